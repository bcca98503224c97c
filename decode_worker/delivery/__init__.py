"""Delivers tokens from the decode worker to their readers: routers, and clients that stream with a ticket.

`token_delivery` runs on the step loop and groups a step's tokens by reader; `router_stream` encodes them as frames on
the event loop; `lookaside` and `ticket_stream` serve clients directly. The worker takes `TokenDelivery` from here, its
services take the streams. Nothing here schedules sequences or knows pages.
"""
