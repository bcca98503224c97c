"""Generates docs/reference/: HTTP from the OpenAPI document, gRPC from the protos, Python from docstrings.

`python -m tests.support.repository.reference --write` writes the pages; `tests/repository/docs/test_reference.py` keeps
them current. Each module renders one page and reads nothing but the repository.
"""
