"""The OpenAI-compatible dialect: bodies to requests, outputs to responses, and what becomes of each field.

`router.api.http` takes the bodies from `requests`, the responses from `responses` and error bodies from there too.
Performs no I/O; this room must not know connections, tenants or workers.
"""
