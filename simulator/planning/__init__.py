"""Plans how many of which worker to buy: from traffic, latency targets, a model and priced accelerators to two pools.

`search.find_plans` screens deployments with the flow model (`flow`), which queues the very requests of the workload at
workers whose steps cost what `simulator.costs` derives; `verify` replays the best ones in the full simulator;
`sensitivity` varies traffic and targets; `explain` and `pages` say why, and `serve_file` writes what `penstock serve`
reads. Modules here are pure, except that `verify` runs simulations. Nothing here is measured on an accelerator.
"""
