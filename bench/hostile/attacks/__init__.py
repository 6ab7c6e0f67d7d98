"""Attacks on a server, by what they aim at."""
