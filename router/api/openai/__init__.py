"""Implements OpenAI's dialect: turns bodies into requests and outputs into responses, and defines how each field is
treated.

`router.api.http` uses the bodies of `requests` and the responses and error bodies of `responses`. This room performs no
I/O and must not know connections, tenants or workers.
"""
