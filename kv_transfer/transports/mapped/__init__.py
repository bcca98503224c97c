"""Transports within one host: the sender maps the receiver's pool into its own address space and copies into it.

`shared_memory` serves CPU pools (`shm`), `cuda_ipc` GPU pools. They share both ends (`ends`) and the link (`link`),
and differ in how a pool is exported, opened and written. Nothing outside this room may know a mapping.
"""
