"""Attacks on a server, grouped by their target."""
