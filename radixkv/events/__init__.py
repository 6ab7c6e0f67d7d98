"""The log of cache events: recorded at the trees, numbered, kept for readers, and published.

Public API: `TreeFeed`, `EventSource`, `EventReaders`.
"""
