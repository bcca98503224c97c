"""The protocol of one transfer, pure: the offer, leases, and the receiver's state machine.

Workers and the simulator take `TransferSession`, `Manifest`, `Effect` and `Lease` from here. No I/O, no threads, no
clock: time is passed in as `now_s`. It must not know transports or pools.
"""
