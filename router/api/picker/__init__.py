"""Implements the endpoint picker, which names the engine that a gateway should send a request to, over Envoy's external
processing protocol.

`router.composition` uses `PickerServer`. Requests are read, admitted and placed like the router's own, but their
answers go from the engine through the gateway. This room must not know how a gateway is configured, nor carry any
request itself.
"""
