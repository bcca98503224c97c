"""Pulls the cached pages of a prompt's prefix from another worker if that should take less time than computing them.

`policy` predicts and decides, `prompts` queues prompts after or beside their pulls, and `client` asks the other worker,
which sends the pages through `worker.handover`. Schedulers let prompts continue with pages that have arrived through
`pulled_pages`. Workers of both roles take `PrefixPulls` and `PrefixSource` from here. Nothing here fails a request:
pages that do not arrive are computed.
"""
