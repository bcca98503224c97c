"""The endpoint picker: names the engine that a gateway sends a request to, over Envoy's external processing protocol.

`router.server` takes `PickerServer`. Requests are read, admitted and placed as the router's own are, but their answers
pass from the engine through the gateway. It must not know how a gateway is configured, nor carry any request itself.
"""
