"""Searches for what one namespace can learn of another: at the cache, and by time over the wire."""
