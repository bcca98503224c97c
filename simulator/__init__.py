"""The router's, schedulers' and autoscaler's own decision code in virtual time. Not built yet."""
