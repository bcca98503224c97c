"""Tests the interleaved attention of Llama 4: batches are split at chunks, and what cannot be split is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.kernels.reference import TorchAttention
from engine.kernels.triton.backend import TritonAttention
from engine.layers.attention_chunks import split_at_chunks
from engine.memory.device_memory import DeviceMemory
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.sizing.model_shape import shape_from_config
from tests.engine.kernels.test_paged_kernels import DEVICE, make_meta, make_pool_layer
from tests.support.engine.checkpoints import make_checkpoint

CHUNK, PAGE_SIZE, DIM = 32, 16, 16
GPU = DeviceMemory("gpu", "cuda", 8 << 30)


def test_a_batch_is_split_at_chunks() -> None:
    query_lens, context_lens = [1, 1, 3, 70, 32], [32, 33, 34, 75, 64]
    meta = make_meta(query_lens, context_lens, PAGE_SIZE, 40)
    found = split_at_chunks(meta, CHUNK, PAGE_SIZE, drops_empty=True)
    assert found.query_start_B1.diff().tolist() == [1, 1, 1, 2, 27, 32, 11, 32]
    assert found.context_lens_B.tolist() == [32, 1, 32, 2, 32, 32, 11, 32]
    assert (found.num_decodes, found.max_query_len, found.max_context_len) == (2, 32, 32)
    table = meta.page_table_BP
    assert found.page_table_BP[1, 0] == table[1, 2]
    assert found.page_table_BP[5].tolist() == table[3, 2:4].tolist()
    assert found.page_table_BP[7].tolist() == table[4, 2:4].tolist()


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 3, 70, 32, 2], [40, 1]])
def test_pieces_without_queries_change_nothing(query_lens: list[int]) -> None:
    """A GPU keeps them; the kernels run in Triton's interpreter where there is none."""
    torch.manual_seed(len(query_lens))
    query_lens = sorted(query_lens, key=lambda count: count > 1)
    context_lens = [count + 30 for count in query_lens]
    meta = make_meta(query_lens, context_lens, PAGE_SIZE, 40)
    pool_layer = make_pool_layer(meta, 40, 1, PAGE_SIZE, DIM).nan_to_num()
    q_TNH = torch.randn(sum(query_lens), 2, DIM, device=DEVICE)
    kept, dropped = (split_at_chunks(meta, CHUNK, PAGE_SIZE, drops_empty=drops) for drops in (False, True))
    found = TritonAttention().paged_attention(q_TNH, pool_layer, kept, 0.3, None)
    expected = TorchAttention().paged_attention(q_TNH, pool_layer, dropped, 0.3, None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_size": 12}, "engine.page_size = 12 does not divide the 16 tokens of the model's attention chunks"),
        ({"attention": "flashinfer"}, "engine.attention = 'flashinfer' does not support attention in chunks; choose"),
        ({"attention": "varlen"}, "engine.attention = 'varlen' does not support attention in chunks; choose"),
    ],
)
def test_settings_that_cannot_split_at_chunks_are_refused(
    settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama4_text", tmp_path)
    config = EngineConfig.model_validate({"model": str(folder), "dtype": "bfloat16", **settings})
    with pytest.raises(ConfigError, match=problem):
        plan_memory(config, GPU)


def test_the_plan_knows_the_shape(tmp_path: Path) -> None:
    folder = make_checkpoint("llama4_text", tmp_path)
    shape = shape_from_config(json.loads((folder / "config.json").read_text()), "llama4")
    model = ModelConfig.from_folder(folder)
    assert model.experts is not None
    assert model.irope is not None
    assert (shape.num_expert_layers, shape.shared_size) == (len(model.experts.layers), model.experts.shared_size)
    assert (shape.intermediate_size, shape.expert_size) == (48, 64)
    assert (shape.window, shape.num_window_layers) == (8, len(model.irope.chunked))
