"""The Anthropic dialect: `POST /v1/messages` and its `count_tokens`, translated into chats and back.

`router.api.http` takes the bodies from `requests`, the response from `responses` and the shape of errors from `errors`.
Performs no I/O; this room must not know connections, tenants or workers.
"""
