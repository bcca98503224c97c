"""Decides whether a request is dispatched, queued or refused, before any work is done for it.

Dispatch uses `gate.AdmissionGate` and its slots; the simulator uses the pure `AdmissionPolicy` that the gate runs; both
use the types of `interface`. Everything but `gate` is pure: time and randomness are passed in. Lanes share the capacity
by weight, and tenants share a lane. An estimate without measurements never leads to a refusal. This room must not know
how requests arrive, where they are placed or what their prompts say. Only `gate` knows the fleet and exchanges tenants'
usage with the other routers.
"""
