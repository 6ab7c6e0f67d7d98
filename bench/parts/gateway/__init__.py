"""Processes of a gateway before servers."""
