"""The page on the metrics port that draws what is cached.

Face: `StateFeed`, `Page`.
"""
