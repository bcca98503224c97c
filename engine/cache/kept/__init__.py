"""Keeps a worker's cache beyond its process: a journal of its pages, and the pool of a dead worker as a source.

`worker.pull.kept` takes `PoolJournal`, which the prefix cache writes, and `KeptPool`, from which a cache brings pages.
The journal's format is in `journal`. Nothing here knows which process keeps the memory.
"""
