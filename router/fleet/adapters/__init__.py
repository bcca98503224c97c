"""Knows the LoRA adapters that requests may name, and changes the file that lists them.

The fleet owns an `AdapterRegistry`; `watch_adapters` makes it follow the configuration. HTTP calls change the list with
`AdapterFile`. Nothing here knows what an adapter computes, or which worker holds it.
"""
