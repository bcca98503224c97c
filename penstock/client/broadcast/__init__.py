"""Broadcasts weights from a trainer to all workers of a deployment.

Trainers take `broadcast_weights` from `trainer`; workers take `BroadcastGroup` from `group` and `WeightsManifest` from
`manifest`. `group` and `trainer` import torch, which the rest of the client does without.
"""
