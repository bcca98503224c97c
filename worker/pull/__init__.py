"""Pulls the cached pages of a prompt's prefix from another worker where that is predicted to take less than computing.

`policy` predicts and decides, `prompts` holds prompts back until their pages are here or will not come, and `client`
asks the other worker, which sends the pages by the hand-over of `worker.handover`. Workers of both roles take
`PrefixPulls` and `PrefixSource` from here. Nothing here fails a request: whatever does not come is computed.
"""
