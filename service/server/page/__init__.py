"""The page on the metrics port that draws what is cached.

Public API: `StateFeed`, `Page`.
"""
