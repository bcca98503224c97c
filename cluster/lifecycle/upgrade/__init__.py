"""Rolling upgrades: new workers beside the old ones, a gate, then one by one in their place, or back.

`RollingUpgrade` runs the stages, `gate_policy` judges new workers against old ones (pure), and `UpgradeService` starts,
aborts and records upgrades for the controller. Which requests reach which cohort is the routers' business; this room
only publishes the shares.
"""
