"""The receiving end of one rank: `TransferReceiver`, its open transfers and its known peers.

Owners offer the pool to a peer, open transfers, and hear what has landed or failed. It fences no page itself, and
must not know ranks other than its own, or any transport by name.
"""
