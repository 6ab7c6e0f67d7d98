"""Generated from proto/radixkv/v1 by `make proto`."""
