"""Scheduling: the queues of unfinished requests, their admission, and the plan of each step.

Public API: `Scheduler`, `Request`, `Admitter`.
"""
