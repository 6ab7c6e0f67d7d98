"""The event log of what is cached: recorded at the trees, numbered, kept for readers, published.

Public API: `TreeFeed`, `EventSource`, `EventReaders`.
"""
