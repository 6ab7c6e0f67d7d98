"""Frozen values that callers send and receive: parameters, results, statistics, limits.

Face: `Caller`, `PrefillParams`, `Sampling`, `Retention`, `Grant`, `PrefillResult`, `GenerateResult`, `Usage`,
`EngineStats`, `Limits`, `MissReason`.
"""
