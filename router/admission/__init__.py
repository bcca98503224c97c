"""Decides whether a request is dispatched, queued or refused, before work is done for it.

Dispatch takes `gate.AdmissionGate` and its slots; the simulator takes the pure `AdmissionPolicy` that the gate runs;
both use the types of `interface`. Everything but `gate` is pure: time and randomness are passed in. Lanes share the
capacity by weight and tenants share a lane; refusals rest on measurements only. The room must not know how requests
arrive, where they are placed or what their prompts say; `gate` alone knows the fleet, and passes what tenants use to
and from the other routers.
"""
