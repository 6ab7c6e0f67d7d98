"""Bandwidth of each store of blocks, beside the bare copy or the bare client that moves the same bytes."""
