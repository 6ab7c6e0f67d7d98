"""Commands that show what is cached: `segments` lists it, `top` watches it.

Face: `add_segments_command`, `add_top_command`.
"""
