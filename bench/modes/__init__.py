"""Traffic through four ways of keeping K and V."""
