"""Files and offline batches: requests from a file that run while other requests leave capacity idle.

Others use `FileStore`, `BatchStore` and `BatchRunner`. Both stores are folders on disk that all routers of a host
share, so a batch outlives the router that runs it and another router continues it. `lines` reads and checks a line,
`input_validation` checks a whole file, and `records` defines what is stored about files and batches. The room must not
know HTTP or how a request is served: the runner is given a function that answers one line.
"""
