"""Starts or joins Ray, and runs the controller, workers and routers as its actors.

`cli` takes `launch` and `RayDeployment` from `launch`; nothing else is used outside this package. `process` implements
`SupervisedProcess`, and `recovery` finds what an earlier controller left running. It must not decide anything about
pools, and no prompt, token or page passes through an actor call.
"""
