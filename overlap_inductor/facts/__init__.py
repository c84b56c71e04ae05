"""Plain data about sites, plans, machines and exchanges. Of the package it imports ``errors`` and ``config`` only."""
