"""Loads what `decode.draft_model` names, and makes the speculator over it."""

from __future__ import annotations

import time

from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.draft_model import DraftModel
from engine.engine import Engine
from engine.models.heads.head_config import is_head
from engine.models.heads.mtp_config import MTP
from engine.step.speculation.speculator import Speculator
from penstock.config import DecodeConfig, EngineConfig

Draft = DraftModel | DraftHead


def load_draft(folder: str, target: EngineConfig, engine: Engine) -> Draft:
    """Loads a head or a small model next to the target's `engine`, with as many pages. Call it before graphs are
    captured. Blocks.

    Raises ConfigError for one that cannot draft for the target, and CheckpointError for a folder that cannot be served.
    """
    if folder == MTP or is_head(folder):
        return DraftHead.load(folder, target.model, engine)
    return DraftModel.load(folder, target, engine.pool.num_pages)


def make_speculator(config: DecodeConfig, draft: Draft | None) -> Speculator | None:
    """Returns what `decode.speculation` asks for; None if it is off."""
    if config.speculation == "off":
        return None
    return Speculator(config.speculation_tokens, time.monotonic, config.speculation == "always", draft=draft)
