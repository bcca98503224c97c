"""Models the world of the simulation: virtual time, processes and calls between them, links for KV, faults and scaling.

`virtual_time.Simulation` owns the time and `network.Network` the processes. The world does not know what its processes
do; only `faults` and `scaling_model` act on a whole fleet.
"""
