"""The log of cache events: they are recorded at the trees, numbered, kept for readers, and published.

Public API: `TreeFeed`, `EventSource`, `EventReaders`.
"""
