"""Latent attention beside K and V of every head: `python -m bench.latent`."""
