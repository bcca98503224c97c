"""Implements Anthropic's dialect: translates `POST /v1/messages` and its `count_tokens` to chats and back.

`router.api.http` uses the bodies of `requests`, the response of `responses` and the error format of `errors`. This room
performs no I/O and must not know connections, tenants or workers.
"""
