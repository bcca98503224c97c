"""The decode worker: owns requests from submission to their last token, and generates the tokens.

`worker` is the core on the step loop; `schedule`, `prefill`, `delivery` and `migrate` are its rooms; `service` and
`request_intake` translate gRPC, and `server` composes everything for a process. Others take `server.DecodeServer`; the
simulator takes the pure scheduler and placement. Nothing here knows prefill workers, routers or the cluster beyond
their protocols.
"""
