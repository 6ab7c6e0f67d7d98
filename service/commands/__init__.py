"""The command line `radixkv`: one module for each group of commands, and what they print."""
