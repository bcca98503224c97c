"""What the dialects that are translated into chats share: reading JSON objects field by field, and building messages.

`router.api.anthropic` and `router.api.responses` take `JsonObject`, `ChatTurns`, `ChatTranslation`, `seal` and
`in_dialect`. This room must not know either of them, and performs no I/O.
"""
