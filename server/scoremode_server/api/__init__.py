"""HTTP in, HTTP out: one module a route, and what routes read and write requests with. Imported by `plugin` alone."""
