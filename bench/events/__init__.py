"""Prefills beside callers that follow what is cached: `python -m bench.events`."""
