"""Everything that needs a GPU, in parts that fit ten minutes each: stages, their limits, and one file of results."""
