"""Receiving requests within limits on memory, time and fair shares, and sending responses to slow readers."""
