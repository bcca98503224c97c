"""Settings of weights that are updated while a deployment serves."""

from __future__ import annotations

from pydantic import Field

from penstock.config.base import FrozenConfig


class LoadedWeightsConfig(FrozenConfig):
    """The weights that a worker loads instead of the model's own: those of the last update."""

    version: int = Field(ge=1)
    """Number of the update."""
    path: str
    """Folder of the safetensors files."""
    digest: str
    """Digest of these files; a worker refuses others."""
