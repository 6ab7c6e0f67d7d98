"""The log of cache events: they are recorded at the trees, numbered, kept for readers, and published.

Public API: `TreeFeed`, `EventLog`, `EventSource`, `EventReaders`, `Identities`, `hash_blocks`, `ZmqPublisher`,
`require_addresses`.
"""
