"""Makes a model of random weights emit a given text: everything is computed and sampled, and then replaced by the
text's token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from engine.engine import Engine
from engine.step.compute import PreparedStep, SampledTokens
from penstock.types import RequestId


class ReplayEngine(Engine):
    """Replaces the tokens that its steps sample once texts are set. Works only on a CPU, where sampled tokens are on
    the host at once.
    """

    _texts: Mapping[RequestId, list[int]] = MappingProxyType({})

    def set_texts(self, texts: Sequence[list[int]]) -> None:
        """Sets the prompt and answer of each request; its number is its identifier."""
        self._texts = {RequestId(str(number)): text for number, text in enumerate(texts)}

    @torch.inference_mode()
    def compute(self, step: PreparedStep, previous: SampledTokens | None = None) -> SampledTokens:
        sampled = super().compute(step, previous)
        if not self._texts:
            return sampled
        places = step.host.sampled_places.tolist()
        ends = step.host.positions_T[step.host.logit_rows_R[: len(places)]].tolist()
        emitted = [
            self._texts[step.work[place].sequence.request_id][end + 1] for place, end in zip(places, ends, strict=True)
        ]
        sampled.token_ids_R[:] = torch.tensor(emitted, dtype=sampled.token_ids_R.dtype)
        return sampled
