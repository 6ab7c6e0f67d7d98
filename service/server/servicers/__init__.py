"""The gRPC services: each method parses a request, calls the engine and builds the response."""
