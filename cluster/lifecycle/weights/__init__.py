"""Updates of the served model's weights: prepared at every worker, then put in force at all of them or at none.

The controller's composition takes `WeightsService`; the Admin service follows its updates. Nothing here reads a tensor
or knows where a worker runs.
"""
