"""Generated from proto/radixkv/gateway by `make proto`: messages under other projects' names."""
