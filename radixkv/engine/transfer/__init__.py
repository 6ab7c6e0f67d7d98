"""K/V that leaves for other servers, and comes from them.

Face: `Transfer`.
"""
