"""KV hints at a worker: followed at a request's end, at once for requests of hints alone, or when a prefetch is due.

Both kinds of worker take `HintFollower`. It runs on the step loop and knows sequences and the engine, but no transfers
and no gRPC.
"""
