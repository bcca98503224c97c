"""What outlives a worker's process: a journal of the pages in its cache, and the pool of a dead worker as a source.

`worker.pull.kept` takes `PoolJournal`, which the prefix cache writes, and `KeptPool`, from which a cache brings pages.
The journal's format is in `journal`. Nothing here knows which process keeps the memory.
"""
