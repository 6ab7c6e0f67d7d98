"""Measures what lossy compression of K/V costs in quality, and what it saves."""
