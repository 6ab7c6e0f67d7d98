"""The gRPC and HTTP server of radixkv, its clients, its command line, and an engine without a server (`offline`)."""
