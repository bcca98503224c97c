"""Compares the autoscaler with queue-length autoscaling and a policy with foresight, on traces in virtual time.

`python -m benchmarks.autoscale` runs it. Tests take `elastic.ElasticFleet`, which changes its pools while it serves,
and `coarse_fleet.CoarseFleet`, which simulates requests about ten times as fast as `simulator.fleet`. It starts no
process and opens no socket.
"""
