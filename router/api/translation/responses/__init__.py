"""The Responses dialect: `/v1/responses` translated into chats and back, and the store of earlier responses.

`router.api.http` takes the bodies from `requests`, the response from `responses`, the shape of errors from `errors` and
`ResponseStore` from `store`. Performs no I/O; this room must not know connections or workers.
"""
