"""Transfers of tensor-parallel workers: one sender or receiver a rank, composed to look like one.

`endpoints` takes `RankedSender` and `RankedReceiver` from here; processes of other ranks run `rank_main`. A transfer
between two single ranks passes straight to the local end. It must not know transports: ranks only share out KV heads.
"""
