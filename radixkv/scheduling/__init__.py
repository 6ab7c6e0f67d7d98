"""Queues of unfinished requests, their admission, and the `StepPlan` that shares the tokens of a step between them.

Face: `Scheduler`, `Request`, `Admitter`.
"""
