"""Migration of running sequences between decode workers, as the controller starts it.

`migration_policy` plans which sequences go where and `rebalance_policy` when load is rebalanced; both are
pure. `MigrationCalls` makes the calls to workers, for drains and for `RebalanceRunner`. How a sequence migrates is the
decode workers' own business (`decode_worker.migrate`).
"""
