"""Public prefixes of a replay."""
