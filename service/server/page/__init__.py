"""The page on the metrics port and the HTTP port that draws what is cached.

Public API: `StateFeed`, `Page`.
"""
