"""HTTP: the routes, and what they share. Only `plugin` imports from here."""
