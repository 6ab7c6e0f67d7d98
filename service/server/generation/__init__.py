"""The options of a Generate call."""
