"""Other projects' suites against a running deployment: `python -m tests.conformance`, which `make conformance` calls.

The suites live in a virtual environment of their own, since their pins are not ours. Pytest does not collect this room.
"""
