"""The sending end of one rank: `TransferSender`, its links to receivers, and the queue of pushes for each.

Owners open a transfer, push pages as they are computed, and are notified when it is over. It must not know the page
pool's bookkeeping, other ranks, or any transport by name.
"""
