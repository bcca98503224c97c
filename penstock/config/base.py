"""Defines the base of every configuration model.

The docstring under a field is its description: docs/configuration.md is generated from them
(`python -m tests.support.repository.configuration --write`). Pydantic does not read them (`use_attribute_docstrings`):
it would parse the source of every model whenever a process starts.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """Is immutable and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
