"""Tracks the fleet as this router sees it: which workers serve, their load and health, and what other routers have in
flight.

Other rooms use `WorkerFleet`, `WorkerGroup`, `FleetWorker`, `TokenLink`, `TicketHolder` (tickets) and `Quarantine`.
After a restart all state is rebuilt from the workers' own streams. This room knows nothing of requests' texts,
sampling, HTTP or the public gRPC service.
"""
