"""Plans how much memory a replica takes, measured against what a device has. Torch-free.

The engine takes `count_pages`, `make_layout`, `select_context` and the estimates of `engine.memory.estimates`, among
them the default length of a prompt chunk by kind of device; the command line takes `plan_memory` and `find_device`.
Nothing here loads a model or allocates memory.
"""
