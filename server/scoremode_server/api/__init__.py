"""HTTP: one module per route, and what routes share. Only `plugin` imports from here."""
