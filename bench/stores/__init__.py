"""Bandwidth of each store of blocks, compared with a bare copy or a bare client of the same bytes."""
