"""The router's two APIs: the public gRPC service and the OpenAI-compatible HTTP calls.

`http` serves the latter and `openai` holds its formats: an HTTP dialect is a `Dialect` (`dialect`), whose outputs
`parsed_outputs` parses; `translation` has the dialects that become OpenAI's chats. Both APIs translate into
`GenerateRequest`, which `prepare` validates and tokenizes; `router.dispatch` does the rest. `router.server` takes
`make_app`, `InferenceService`, `RequestPreparer` and `Tenants`. This room knows who calls, how large a
request may be and how fields are named outside; no other room of the router imports it, and it knows no worker.
"""
