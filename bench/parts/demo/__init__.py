"""Parts of the demos."""
