"""Judges whether workers and routers are alive, whether workers compute correctly, and whether the deployment can serve
a request.

Others take `follow_worker` and `follow_router` from `liveness`, `CanaryCheck` and `CanaryRunner` from `canary_check`,
`CanaryJudge` from `canary_policy`, `Readiness` from `readiness`, `GoneWorkers` from `gone_workers` and the count of a
silence from `silence_policy`.
This room must not start, replace or end a process, and must not know Ray.
"""
