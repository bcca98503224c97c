"""The router: authenticates, admits, tokenizes and places requests, and streams text to clients.

`api` receives requests, `text` tokenizes them, `admission` admits them, `routing` chooses their workers, `dispatch`
sends them there and follows them, `parsers` parses outputs, `batches` runs offline batches, `fleet` follows the
workers, and `metrics`, `tracing` and `live` show what happens. `cluster` uses `RouterServer` (router.server); a process
runs `python -m router`. The router imports neither torch nor ray, and holds no state that workers could not report
again.
"""
