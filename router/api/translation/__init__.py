"""Holds the dialects that are translated to OpenAI's chats, `anthropic` and `responses`, and the code that they share.

Both use `JsonObject`, `ChatTurns`, `ChatTranslation`, `seal` and `in_dialect` from the modules here, which must not
know either dialect. `router.api.http` uses the bodies and responses of the two rooms. Performs no I/O.
"""
