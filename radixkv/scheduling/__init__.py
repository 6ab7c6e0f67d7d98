"""Scheduling: the queues of unfinished requests, their admission, and the plan of each step.

Face: `Scheduler`, `Request`, `Admitter`.
"""
