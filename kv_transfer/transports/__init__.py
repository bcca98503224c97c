"""The transports that carry pages, behind the protocols of `transport`: mapped memory of one host, NIXL, or
torch.distributed.

`registry` lists the transports that this process can use, best first; only it knows them by name. A transport moves
rows of bytes and reports what arrived. It must not know layouts, request lanes or which transfers are open.
"""
