"""Files and offline batches: requests from a file that run while others leave capacity idle.

Others take `FileStore`, `BatchStore` and `BatchRunner`. Both stores are folders on disk which all routers of a host
share, so a batch outlives the router that runs it, and another one continues it. `lines` says what a line may be,
`input_validation` what a whole file may be, and `records` what is kept of a batch. The room knows neither HTTP nor how
a request is served: the runner is given a function that answers one line.
"""
