"""Prefills while clients subscribe to events: `python -m bench.events`."""
