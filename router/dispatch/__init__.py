"""Sends placed requests to their workers and follows them to their ends.

`router.api` takes `Dispatcher` and `Route`; `router.composition` makes the `DispatchContext`. A stream re-dispatches a
completion whose worker is lost, and follows a sequence that migrates. This room knows nothing of HTTP, of the public
gRPC service or of API keys: requests come validated and tokenized, as `PreparedRequest`.
"""
