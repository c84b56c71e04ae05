"""Plain data about sites, plans, machines and exchanges. Imports nothing of the package but ``errors`` and ``config``."""
