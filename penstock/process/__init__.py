"""Sets up every process of a deployment: logging, limits and signals, and owners of its background tasks.

Others take `set_up_logging` and `Shutdown` from `setup`, and `TaskSet` from `task_set`. Nothing here knows what a
process serves.
"""
