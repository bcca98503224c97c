"""The public client of a deployment's gRPC API, blocking and for asyncio.

`async_client` and `async_stream` are the source of both clients: `sync_client` and `sync_stream` are generated from
them (`make client`), and `async_io` and `sync_io` hold the differences. Users take `Client` and `AsyncClient` from
`penstock`, `ClientTls` from `auth`, results from `results`. The client must not know configuration or any part of a
server.
"""
