# SPDX-License-Identifier: Apache-2.0
"""Plain data about sites, plans, machines and exchanges. Of the package it imports ``errors`` only."""
