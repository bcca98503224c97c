"""Changes to a running deployment: drains, role flips, resizing, leaving nodes, migration and rolling upgrades.

`*_policy` modules decide and are pure; `*_service` and `*_runner` modules act on the controller's event loop.
`CapacityCheck` refuses what the machines cannot hold. The controller and the Admin service take `DrainService`,
`PoolService`, `RelocationService`, `UpgradeService` and `RebalanceRunner`. Nothing here knows Ray, gRPC servers or the
command line; processes are `SupervisedProcess`es.
"""
