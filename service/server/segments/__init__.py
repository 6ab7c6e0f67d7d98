"""Lists cached segments for operators, in short calls of the engine.

Face: `SegmentLister`, `HotWalk`.
"""
