"""The fleet as this router sees it: which workers serve, how each fares, and what other routers have in flight.

Other rooms take `WorkerFleet`, `WorkerGroup`, `FleetWorker`, `TokenLink`, `TicketHolder` (tickets) and `Quarantine`.
Everything here is rebuilt from the workers' own streams after a restart. It knows neither requests' texts nor sampling,
and nothing of HTTP or of the public gRPC service.
"""
