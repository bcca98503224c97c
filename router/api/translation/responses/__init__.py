"""Implements the Responses dialect: translates `/v1/responses` to chats and back, and stores earlier responses.

`router.api.http` uses the bodies of `requests`, the response of `responses`, the error format of `errors` and
`ResponseStore` from `store`. This room performs no I/O and must not know connections or workers.
"""
