"""Choice of the tokens of each step, and admission of the requests that get blocks for them.

Face: `Scheduler`, `Request`, `Admitter`.
"""
