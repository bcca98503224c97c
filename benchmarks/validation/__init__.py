"""Compares the simulator with the real system on the same requests, in the same hour.

`workloads` makes five small ones, `measured` runs them on plain processes of this machine, `predicted` runs them in
virtual time with costs fitted to a separate run, and `__main__` writes tables and charts. Only the fit sees measured
times.
"""
