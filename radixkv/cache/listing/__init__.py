"""The segments of a cache, looked at a few at a time.

Face: `SegmentIndex`, `SegmentSource`.
"""
