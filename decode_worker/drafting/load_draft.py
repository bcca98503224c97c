"""Loads what `decode.draft_model` names, and makes the speculator over it."""

from __future__ import annotations

import time
from pathlib import Path

from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.draft_model import DraftModel
from engine.engine import Engine
from engine.models.heads.head_config import is_head
from engine.models.heads.head_loader import check_mtp_update
from engine.models.heads.mtp_config import MTP
from engine.step.speculation.speculator import Speculator
from penstock.config import DecodeConfig, EngineConfig, LoadedWeightsConfig

Draft = DraftModel | DraftHead


def load_draft(folder: str, target: EngineConfig, engine: Engine) -> Draft:
    """Loads a head or a small model next to the target's `engine`, with as many pages. Call it before graphs are
    captured. Blocks.

    Raises ConfigError for one that cannot draft for the target, and CheckpointError for a folder that cannot be served.
    """
    if folder == MTP or is_head(folder):
        return DraftHead.load(folder, target.model, engine)
    return DraftModel.load(folder, target, engine.pool.num_pages)


def check_draft_update(folder: str | None, engine: Engine, weights: LoadedWeightsConfig) -> None:
    """Raises CheckpointError for new weights that `load_draft` could not load the same draft beside."""
    if folder == MTP:
        check_mtp_update(engine.model, Path(weights.path))


def make_speculator(config: DecodeConfig, draft: Draft | None) -> Speculator | None:
    """Returns what `decode.speculation` asks for; None if it is off."""
    if config.speculation == "off":
        return None
    return Speculator(config.speculation_tokens, time.monotonic, config.speculation == "always", draft=draft)
