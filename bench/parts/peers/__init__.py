"""Adapters to other projects, so that each is measured on the same work."""
