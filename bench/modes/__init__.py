"""Traffic through ways of keeping K and V."""
