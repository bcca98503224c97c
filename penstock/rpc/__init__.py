"""Connects the processes of a deployment: servers and channels, TLS and tokens, tickets, metadata.

Others take `GrpcServer` and `make_channel` from `server`, `Trust` from `trust`, `ClientTls` from `tls`, `ClusterSecret`
from `secret`, and the hints and tickets of single requests. Nothing here knows what calls are about.
"""
