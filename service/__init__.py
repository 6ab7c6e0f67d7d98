"""The gRPC face of radixkv: server, client and command line."""
