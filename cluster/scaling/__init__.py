"""The autoscaler: decides how many workers each pool has and which ones change their role.

`AutoscalerPolicy` decides from `Signals`; with `sizing_policy`, `traffic` and `profiles` it is pure and also runs in
the simulator. `AutoscalerRunner` gathers the signals on the controller's event loop and carries the decisions out
through a `ScalableDeployment`. It does not know how workers are started, drained or flipped.
"""
