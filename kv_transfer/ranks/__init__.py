"""Transfers of tensor-parallel workers: one sender or receiver per rank, composed to look like one.

`endpoints` takes `RankedSender` and `RankedReceiver` from here; processes of other ranks run `rank_main`. A transfer
between two single ranks passes straight to the local end. It must not know transports: it only distributes KV heads
over ranks.
"""
