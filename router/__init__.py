"""The router: authenticates, admits, tokenizes and places requests, and streams text to clients.

`api` takes requests in, `text` tokenizes, `parsers` parses outputs, `admission` admits, `routing` places, `dispatch`
follows requests at workers, `fleet` knows the workers and `metrics` counts. `cluster` takes `RouterServer`
(router.server); a process runs `python -m router`. The router imports neither torch nor ray, and holds no state that
workers could not report again.
"""
