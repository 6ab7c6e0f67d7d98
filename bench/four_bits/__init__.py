"""Ways to store K and V in 4 bits, compared."""
