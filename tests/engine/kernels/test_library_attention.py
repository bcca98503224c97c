"""Tests attention by libraries: calls follow the libraries' documentation, and unsupported cases are refused."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache.kv_layout import KVLayout
from engine.engine import Engine
from engine.generate import generate
from engine.graphs.cuda_graphs import Capture, CudaCapture
from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, Lengths
from engine.kernels.backends import select_backend
from engine.kernels.libraries.attention import AttentionLibrary, LibraryAttention
from engine.kernels.libraries.capabilities import LIBRARIES, AttentionChoice, check_library, choose_attention
from engine.kernels.libraries.cudnn import CudnnAttention, PieceShapes, join_by_lse
from engine.kernels.libraries.flashinfer_memory import WORKSPACE_BYTES, captured_bytes
from engine.kernels.reference import TorchAttention
from engine.memory.device_memory import DeviceMemory
from engine.memory.estimates import SPARE_DECODE_ITEMS, captures_graphs, make_layout
from engine.memory.plan import plan_memory
from engine.models.config import ModelConfig
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.types import SamplingParams
from tests.engine.kernels.test_paged_kernels import make_meta, make_pool_layer
from tests.engine.step.test_graphs import GraphDouble
from tests.support.engine import attention_doubles
from tests.support.engine.attention_doubles import CudnnDouble
from tests.support.engine.checkpoints import make_checkpoint

CPU = torch.device("cpu")
DOCS = Path(__file__).resolve().parents[3] / "docs/engine.md"
SMALL = PieceShapes(fewest_queries=16, long_queries=32, segments=(64, 32, 16))
ADAPTER = "engine.kernels.libraries.flashinfer"
BATCHES = [
    ([1, 1, 1], [17, 70, 1]),
    ([5, 19], [5, 50]),
    ([1, 1, 3, 19, 2], [17, 70, 3, 50, 64]),
    ([1, 40, 64, 2, 16], [9, 40, 300, 7, 160]),
]


@pytest.fixture
def _doubles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    attention_doubles.install(monkeypatch)
    yield
    sys.modules.pop(ADAPTER, None)  # the adapter has imported the double


def make_library(name: str) -> AttentionLibrary:
    if name == "cudnn":
        return CudnnAttention(_Clean(TorchAttention()), SMALL)
    if name == "varlen":
        # This imports torch's compiler, which takes a second.
        from engine.kernels.libraries.varlen import VarlenAttention

        return VarlenAttention()
    module = importlib.import_module(ADAPTER)
    module.WORKSPACE_BYTES = 4096  # type: ignore[attr-defined]
    return module.FlashInferAttention(CPU)


def make_problem(
    query_lens: list[int], context_lens: list[int], page_size: int = 16, kv_heads: int = 2, dim: int = 24
) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(context_lens))
    num_pages = sum(-(-context // page_size) for context in context_lens) + 2
    meta = make_meta(query_lens, context_lens, page_size, num_pages)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    meta = replace(meta, lengths=Lengths(np.array(context_lens, np.int64), starts))
    pool = make_pool_layer(meta, num_pages, kv_heads, page_size, dim)
    return meta, pool, torch.randn(sum(query_lens), 6, dim)


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize(("query_lens", "context_lens"), BATCHES)
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize(
    ("name", "softcap"), [("flashinfer", None), ("flashinfer", 3.0), ("varlen", None), ("cudnn", None)]
)
def test_a_library_attends_like_the_reference(
    name: str, softcap: float | None, window: int | None, query_lens: list[int], context_lens: list[int]
) -> None:
    meta, pool, q_TNH = make_problem(query_lens, context_lens)
    own = TorchAttention()
    attention = LibraryAttention(name, _Clean(own), make_library(name))
    found = attention.paged_attention(q_TNH, pool, meta, 0.3, window, softcap)
    expected = own.paged_attention(q_TNH, pool.nan_to_num(), meta, 0.3, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class _Clean:
    """Runs the reference over a pool whose NaNs are replaced, since the reference multiplies stale values by zero."""

    def __init__(self, own: TorchAttention) -> None:
        self._own = own
        self.name = own.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def paged_attention(self, q_TNH: torch.Tensor, pool_layer: torch.Tensor, *others: Any) -> torch.Tensor:
        return self._own.paged_attention(q_TNH, pool_layer.nan_to_num(), *others)


@pytest.mark.usefixtures("_doubles")
def test_a_step_is_planned_once_for_layers_that_share_a_plan() -> None:
    library = make_library("flashinfer")
    attention = LibraryAttention("flashinfer", TorchAttention(), library)
    for number, (query_lens, context_lens) in enumerate(BATCHES, start=1):
        meta, pool, q_TNH = make_problem(query_lens, context_lens)
        for _ in range(2):
            for window in (None, 9):
                attention.paged_attention(q_TNH, pool, meta, 0.3, window)
        plans = {form: planned.wrapper.num_plans for form, planned in library._planned.items()}  # type: ignore[attr-defined]
        assert all(count <= number for count in plans.values())
    assert {(form.decodes, form.window): count for form, count in plans.items()} == {
        (True, None): 3, (True, 9): 3, (False, None): 3, (False, 9): 3,
    }  # fmt: skip


@pytest.mark.usefixtures("_doubles")
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_replica_with_a_library_samples_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("mistral", tmp_path, sliding_window=11)
    config = EngineConfig(model=str(folder), dtype="float32", num_pages=32, num_threads=1, attention="torch")
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    prompt = list(range(5, 42))
    wanted = generate(Engine.load(config), prompt, sampling, chunk_tokens=15)
    attention = LibraryAttention(name, _Clean(TorchAttention()), make_library(name))
    monkeypatch.setattr("engine.parallel.model_part.select_backend", lambda name, device: attention)
    assert generate(Engine.load(config), prompt, sampling, chunk_tokens=15) == wanted


def test_parts_in_bf16_are_joined_in_float32() -> None:
    parts = [torch.randn(2, 5, 8).bfloat16() for _ in range(2)]
    lse = [torch.randn(2, 5), torch.full((2, 5), -50.0)]
    joined, both = join_by_lse(parts[0], lse[0], parts[1], lse[1])
    assert joined.dtype == torch.float32
    torch.testing.assert_close(joined, parts[0].float())
    torch.testing.assert_close(both, lse[0])


@pytest.mark.usefixtures("_doubles")
def test_cudnn_meets_few_shapes_whatever_the_lengths() -> None:
    double = CudnnDouble()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.kernels.libraries.cudnn._attend", double)
        attention = LibraryAttention("cudnn", _Clean(TorchAttention()), make_library("cudnn"))
        for queries in range(17, 33):
            for before in (0, 5, 16, 47, 130):
                meta, pool, q_TNH = make_problem([queries], [before + queries])
                attention.paged_attention(q_TNH, pool, meta, 0.3, None)
    squares = {(length, length, True) for length in (32, 48)}
    assert double.shapes == squares | {(32, segment, False) for segment in (16, 32, 64)}


def test_cudnns_default_pieces_cover_every_context_without_overlap() -> None:
    shapes = PieceShapes()
    squares = {shapes.padded(length) for length in range(1, 8192 + 512)}
    rectangles = {shapes.padded(length) for length in range(1, 8193)}
    assert (len(squares), len(rectangles) * len(shapes.segments)) == (15, 42)
    for length in range(0, 40000, 512):
        pieces = list(shapes.segments_of(length))
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces)][: len(pieces)]
        assert (pieces[-1][1] if pieces else 0) == length
        assert {stop - start for start, stop in pieces} <= set(shapes.segments)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_refused_with_the_fix(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.attention = '{name}' needs a GPU.*give engine.attention = 'auto'"):
        select_backend(name, CPU)
    package = {"flashinfer": "flashinfer-python", "varlen": "flash_attn_interface", "cudnn": "cuDNN 9"}[name]
    with pytest.raises(ConfigError, match=rf"install .*{package}.*or choose engine.attention = 'triton'"):
        choose_attention(name, (9, 0), {"triton"})
    with pytest.raises(ConfigError, match=r"of compute capability \d.0, and this one has 7.5"):
        choose_attention(name, (7, 5), LIBRARIES)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("installed", [(), ("flashinfer",), ("varlen", "cudnn"), tuple(LIBRARIES)])
def test_the_choice_follows_from_setting_device_model_and_installation(
    capability: tuple[int, int], installed: tuple[str, ...], tmp_path: Path
) -> None:
    """The rules are written here once more, as `docs/engine.md` has them."""
    oldest = {"flashinfer": (8, 0), "varlen": (9, 0), "cudnn": (9, 0)}
    dims = {"flashinfer": (64, 128, 256), "varlen": (64, 96, 128, 192, 256), "cudnn": (64, 96, 128)}
    assert choose_attention("auto", capability, installed) == AttentionChoice("triton", "triton")
    assert choose_attention("triton", capability, installed) == AttentionChoice("triton", "triton")
    for name, (dtype, dim) in itertools.product(oldest, itertools.product(("bfloat16", "float32"), (64, 80, 256))):
        layout = KVLayout(2, 2, 16, dim, dtype, "r")
        can = capability >= oldest[name] and name in installed and dtype == "bfloat16" and dim in dims[name]
        found = None
        with contextlib.suppress(ConfigError):
            check_library(name, layout, has_latents=False, has_softcap=False, has_sinks=False)
            found = choose_attention(name, capability, installed)
        decodes = name if name == "flashinfer" else "triton"
        assert found == (AttentionChoice(decodes, name) if can else None), (name, dtype, dim)


def test_the_documentation_lists_every_library_and_what_it_computes() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    chunks = next(i for i, row in enumerate(rows) if row.startswith("| attention of prompts"))
    decodes = next(i for i, row in enumerate(rows) if row.startswith("| attention of decodes"))
    latents = next(i for i, row in enumerate(rows) if row.startswith("| latents"))
    for name, library in LIBRARIES.items():
        assert any(f"`{name}`" in row for row in rows[chunks:latents]), name
        assert any(f"`{name}`" in row for row in rows[decodes:chunks]) == library.takes_decodes, name


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("deepseek_v2", {}, "does not support latent attention"),
        ("llama", {"kv_dtype": "fp8"}, "engine.kv_dtype = 'fp8' has them; leave it at 'auto'"),
        ("llama", {"dtype": "float32"}, "engine.dtype is 'float32'; give one of those"),
        ("llama", {}, r"heads of 64, .* values, and the model's have 16; choose engine.attention = 'triton'"),
    ],
)
def test_unsupported_models_are_refused_before_loading(
    name: str, family: str, settings: dict[str, object], problem: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(family, tmp_path)
    config = EngineConfig.model_validate({"model": str(folder), "attention": name, "dtype": "bfloat16", **settings})
    with pytest.raises(ConfigError, match=problem):
        plan_memory(config, DeviceMemory("a GPU", "cuda", 8 << 30))
    with pytest.raises(ConfigError, match=problem):
        Engine.load(config)


def test_a_librarys_workspace_is_in_the_memory_plan(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, head_dim=64)
    gpu = DeviceMemory("a GPU", "cuda", 8 << 30)
    model = ModelConfig.from_folder(folder)
    plans = {}
    for name in ("triton", *LIBRARIES):
        config = EngineConfig.model_validate({"model": str(folder), "attention": name, "dtype": "bfloat16"})
        check_library(name, make_layout(config, model), has_latents=False, has_softcap=False, has_sinks=False)
        assert captures_graphs(config, model, "cuda")
        plans[name] = plan_memory(config, gpu)
    assert plans["varlen"] == plans["triton"]
    assert plans["cudnn"].graph_bytes == plans["triton"].graph_bytes
    assert plans["cudnn"].num_pages < plans["triton"].num_pages
    more = plans["flashinfer"].graph_bytes - plans["triton"].graph_bytes
    splits = (config.cuda_graphs + SPARE_DECODE_ITEMS) * model.num_heads * 64 * 4
    table_pages = -(-model.context_length // config.page_size)
    assert more == captured_bytes(model.num_heads, model.num_kv_heads, 64, config.cuda_graphs, table_pages) - splits
    lost = (plans["triton"].num_pages - plans["flashinfer"].num_pages) * plans["triton"].layout.page_bytes
    assert abs(lost - 0.9 * (WORKSPACE_BYTES + more)) <= plans["triton"].layout.page_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("window", [None, 13])
def test_the_library_agrees_with_triton_on_a_gpu(name: str, window: int | None) -> None:
    try:
        attention = select_backend(name, torch.device("cuda"))
    except ConfigError as error:
        pytest.skip(str(error))
    for query_lens, context_lens in [*BATCHES, ([1, 300, 20, 2100], [90, 300, 700, 13000])]:
        meta, pool, _ = make_problem(query_lens, context_lens, dim=128)
        whole, q_TNH = pool.cuda().bfloat16(), torch.randn(sum(query_lens), 6, 128, device="cuda").bfloat16()
        found = attention.paged_attention(q_TNH, whole, meta, 0.1, window)
        expected = select_backend("triton", torch.device("cuda")).paged_attention(q_TNH, whole, meta, 0.1, window)
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)  # both round to bf16 twice


@pytest.mark.usefixtures("_doubles")
def test_replayed_decodes_agree_with_the_reference() -> None:
    own = TorchAttention()
    check_replays(LibraryAttention("flashinfer", own, make_library("flashinfer")), own, GraphDouble(), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_captured_decodes_agree_with_triton_on_a_gpu() -> None:
    try:
        attention = select_backend("flashinfer", torch.device("cuda"))
    except ConfigError as error:
        pytest.skip(str(error))
    assert isinstance(attention, LibraryAttention)
    check_replays(attention, select_backend("triton", torch.device("cuda")), CudaCapture(), torch.bfloat16)


def check_replays(library: LibraryAttention, own: AttentionBackend, capture: Capture, dtype: torch.dtype) -> None:
    """Captures decodes of short contexts, and replays them with others."""
    problems = [make_problem([1] * 4, contexts, dim=128) for contexts in ([1] * 4, [17, 70, 1, 900], [2000, 5, 16, 33])]
    device = problems[0][0].page_table_BP.device
    pool = torch.zeros(max(len(pages) for _, pages, _ in problems), *problems[0][1].shape[1:], device=device).to(dtype)
    q_BNH, table_BW = torch.zeros(4, 6, 128, device=device, dtype=dtype), torch.zeros(4, 128, dtype=torch.int32)
    table_BW, found = table_BW.to(device), torch.zeros_like(q_BNH)
    planner, captured = library.planner, replace(problems[0][0], lengths=None)
    assert planner is not None
    planner.plan_decodes(table_BW, np.ones(4, np.int64), 16)

    def run() -> None:
        found.copy_(library.paged_attention(q_BNH, pool, captured, 0.1, None))

    replay = capture(run)
    for meta, pages, queries in problems:
        pool[: len(pages)] = pages.nan_to_num().to(pool)
        q_BNH.copy_(queries)
        table_BW[:, : meta.page_table_BP.shape[1]] = meta.page_table_BP
        assert meta.lengths is not None
        planner.plan_decodes(table_BW, meta.lengths.context_B, 16)
        replay()
        expected = own.paged_attention(q_BNH, pool, meta, 0.1, None)
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
