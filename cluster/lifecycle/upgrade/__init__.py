"""Rolling upgrades: new workers start beside the old ones and must pass a gate; then they replace them one by one.

`RollingUpgrade` runs the stages, `gate_policy` judges new workers against old ones (pure), and `UpgradeService` starts,
aborts and records upgrades for the controller. Routers decide which requests reach which cohort; this room only
publishes the shares.
"""
