"""Starts workers and routers of tests by forking a process that has imported torch and the rest already.

An import of torch and of our own modules takes three seconds of a core, a fork none. Take `start_module` for every
`python -m MODULE` of ours; it forks once `use_forks` was called, as tests/conftest.py does, and starts another Python
otherwise: in benchmarks, and in tests with `pytest --fresh-processes`. Forked or not, it is a process of its own, with
its own files, signals and exit status; only its command line is the server's. The room knows nothing of what the
modules do.

Within `forked_ray_workers`, the workers that Ray starts are forks of the same server, which saves more than two seconds
of a core for each; but their parent, command line and first environment are the server's, so a test of those starts Ray
without it.
"""
