"""Guard of a store: a time limit for each call, and a circuit that leaves a failing store alone for a while.

Public API: `GuardedStore`, `Circuit`, `AlarmClock`.
"""
