"""Sends placed requests to their workers and follows them to their ends.

`router.api` uses `Dispatcher` and `Route`; `router.composition` makes the `DispatchContext`. A stream re-dispatches a
completion whose worker is lost, and follows a sequence that migrates. The room must not know HTTP, the public gRPC
service or API keys: requests arrive validated and tokenized, as `PreparedRequest`.
"""
