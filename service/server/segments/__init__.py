"""Lists cached segments for operators, in short calls of the engine.

Public API: `SegmentLister`, `HotWalk`.
"""
