"""Starts workers and routers of tests by forking a process that has already imported torch and our modules.

Importing torch and our modules takes three seconds of a core; a fork takes none. Use `start_module` for every `python
-m MODULE` of ours. It forks once `use_forks` was called, as tests/conftest.py does, and otherwise starts another
Python: in benchmarks, and in tests with `pytest --fresh-processes`. Forked or not, it is a separate process with its
own files, signals and exit status; only its command line is the server's. The room knows nothing of what the modules
do.

Within `forked_ray_workers`, the workers that Ray starts are forks of the same server, which saves more than two seconds
of a core for each. Their parent, command line and initial environment are the server's, so a test of those starts Ray
without it.
"""
