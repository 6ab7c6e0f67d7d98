"""Names of adapters, and what loads, replaces and unloads the adapters behind them while requests run.

Face: `Adapters`, `AdapterNames`, `AdapterDevice`.
"""
