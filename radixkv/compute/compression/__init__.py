"""K/V entries of one request that are chosen, copied and dropped; the attention by which they are chosen.

Public API: `KeptEntries`.
"""
