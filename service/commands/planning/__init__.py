"""Commands that estimate before anything is served: `plan` and `simulate`.

Face: `add_plan_command`, `add_simulate_command`.
"""
