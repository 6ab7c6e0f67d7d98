"""Searches for information leaks between namespaces: cache hits, and response times."""
