"""The receiving end of one rank: `TransferReceiver`, its open transfers and its known peers.

Owners offer the pool to a peer, open transfers, and are notified of what has landed or failed. It fences no pages
itself, and must not know other ranks or any transport by name.
"""
