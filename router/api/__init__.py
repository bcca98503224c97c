"""Serves the router's two APIs: the public gRPC service and the HTTP API.

`http` serves the HTTP API and `openai` defines OpenAI's formats. Each HTTP format is a `Dialect` (`dialect`), whose
outputs `parsed_outputs` parses; `translation` has the dialects that are translated to OpenAI's chats. Both APIs produce
`GenerateRequest`s, which `prepare` validates and tokenizes; `router.dispatch` does the rest. `router.server` uses
`make_app` and `InferenceService`, `router.composition` uses `RequestPreparer` and `Tenants`. This room knows who calls,
how large a request may be and how clients name the fields. No other room of the router imports it, and it knows no
worker.
"""
