"""Products of rows with a weight, by library."""
