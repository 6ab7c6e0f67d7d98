"""Values that callers send and receive; `Limits` refuses a request that could never be served.

Public API: `Caller`, `PrefillParams`, `Sampling`, `Retention`, `Grant`, `PrefillResult`, `GenerateResult`, `Usage`,
`EngineStats`, `Limits`, `MissReason`, `Awaits`.
"""
