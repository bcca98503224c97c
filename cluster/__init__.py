"""Starts, supervises, scales and upgrades a deployment: the control plane.

`controller` owns desired replica counts, `pools` their bookkeeping, `health` the verdicts on workers, `lifecycle` and
`scaling` the changes that operators and the autoscaler ask for, `ray` the processes, and `cli` the `penstock` command.
No prompt, no token and no page passes through this package, and only `simulator` among the other root packages imports
it.
"""
