"""The OpenAI-compatible dialect: bodies to requests, outputs to responses, and how each field is treated.

`router.api.http` takes the bodies from `requests`, the responses from `responses` and error bodies from there too.
Performs no I/O; this room must not know connections, tenants or workers.
"""
