"""Peers that are run beside us: how each is asked the same."""
