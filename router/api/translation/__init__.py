"""The dialects that are translated into chats, `anthropic` and `responses`, and what they share.

Both take `JsonObject`, `ChatTurns`, `ChatTranslation`, `seal` and `in_dialect` from the modules here, which must not
know either of them. `router.api.http` takes the bodies and responses of the two rooms. Performs no I/O.
"""
