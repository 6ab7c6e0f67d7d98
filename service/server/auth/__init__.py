"""Authentication of callers by token or certificate, authorization of each method, and TLS."""
