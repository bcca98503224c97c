"""Runs other projects' suites against a running deployment: `python -m tests.conformance`, as `make conformance` does.

The suites have a virtual environment of their own, because their pinned versions differ from ours. Pytest does not
collect this room.
"""
