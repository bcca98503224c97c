"""The base of every configuration model.

The docstring under a field is its description: docs/configuration.md is generated from them
(`python -m tests.support.repository.configuration --write`).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenConfig(BaseModel):
    """Is immutable and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
