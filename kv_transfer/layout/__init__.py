"""Page bytes: views of a pool as rows, resharding between two layouts, staging of repacked pages, checksums.

Senders and transports take `PageBuffer`, `ReshardPlan` and `PageRows` from here. It knows tensors and KV layouts; it
must not know peers, transports or transfers.
"""
