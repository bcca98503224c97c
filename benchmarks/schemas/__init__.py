"""Checks outputs against the schemas of public suites: `python -m benchmarks.schemas`.

The suites are downloaded (`suites`), every schema is sent to a deployment, and each answer is judged (`judge`) by a
library that took no part in generating it.
"""
