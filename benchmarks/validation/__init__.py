"""Holds the simulator against the real system: the same requests, the same hour, figures side by side.

`workloads` are five small ones, `measured` runs them on plain processes of this machine and fits costs to a run of its
own, `predicted` runs them in virtual time, and `__main__` writes tables and charts. Only the fit sees measured times.
"""
