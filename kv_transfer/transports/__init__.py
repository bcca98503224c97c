"""The transports, which carry pages: mapped memory of one host, NIXL, or torch.distributed, behind the protocols of
`transport`.

`registry` lists the transports that this process can use, best first; it alone knows them by name. A transport moves
rows of bytes and reports what arrived. It must not know layouts, request lanes or which transfers are open.
"""
