"""Identity of callers: who one is, by token or certificate, and which calls that allows.

Public API: `Identity`, `Gate`, `Doors`, `require_secure`.
"""
