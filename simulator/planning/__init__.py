"""Plans which workers to buy and how many: takes traffic, latency targets, a model and priced accelerators, and returns
two pools.

`search.find_plans` screens deployments with the flow model (`flow`), which queues the workload's own requests at
workers with the step costs of `simulator.costs`; `verify` replays the best ones in the full simulator; `outlook`
varies traffic and targets; `report` and `html_report` give the reasons, and `serve_file` writes what `penstock serve`
reads. Modules here are pure, except that `verify` runs simulations. Nothing here is measured on an accelerator.
"""
