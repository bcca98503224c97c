"""Tests readers of weight files: each byte is in its place, in any order, with any stripes and read-ahead bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.weights import file_readers
from engine.weights.file_readers import DeviceReaders, FileSpan, ReadAhead
from penstock.errors import CheckpointError
from tests.support.suite.examples import examples

CPU = torch.device("cpu")
SIZES = (5000, 0, 1, 12289, 4096, 700)


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, FileSpan], dict[str, bytes]]:
    """Returns spans in two files, with gaps between them, and their bytes."""
    folder = tmp_path_factory.mktemp("weights")
    data = bytes(
        torch.randint(0, 256, (40_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy()
    )
    found, content, offset = {}, {}, 13
    for name in ("a", "b"):
        (folder / name).write_bytes(data)
    for index, size in enumerate(SIZES):
        found[str(index)] = FileSpan(folder / "ab"[index % 2], offset, size)
        content[str(index)] = data[offset : offset + size]
        offset += size + 7
    return found, content


@examples(25)
@given(
    st.permutations([str(index) for index in range(len(SIZES))]),
    st.integers(1, 4),
    st.sampled_from([1, 6000, 10**9]),
    st.sampled_from([1000, 4096, 10**6]),
)
def test_spans_taken_in_any_order_have_their_bytes(
    spans: tuple[dict[str, FileSpan], dict[str, bytes]], order: list[str], readers: int, ahead: int, stripe: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_readers, "STRIPE_BYTES", stripe)
        reading = DeviceReaders(spans[0], CPU, readers, ahead)
        try:
            for name in [*order, order[0]]:  # a tensor may be taken twice
                assert bytes(reading.take(name).numpy()) == spans[1][name]
        finally:
            reading.close()


def test_a_truncated_file_is_an_error_when_its_span_is_taken(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    reading = DeviceReaders(
        {"whole": FileSpan(tmp_path / "short", 0, 90), "cut": FileSpan(tmp_path / "short", 50, 51)}, CPU
    )
    try:
        assert bytes(reading.take("whole").numpy()) == b"x" * 90
        with pytest.raises(CheckpointError, match="short ends before byte 101; fetch it again"):
            reading.take("cut")
    finally:
        reading.close()


def test_a_reader_that_cannot_start_is_an_error_when_a_span_is_taken(
    spans: tuple[dict[str, FileSpan], dict[str, bytes]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_readers, "STRIPE_BYTES", -1)  # no buffer can be allocated
        reading = DeviceReaders(spans[0], CPU)
        for thread in reading._threads:
            thread.join(60)
    with pytest.raises(RuntimeError):
        reading.take("0")
    reading.close()


def test_closing_early_ends_the_readers(spans: tuple[dict[str, FileSpan], dict[str, bytes]]) -> None:
    reading = DeviceReaders(spans[0], CPU, ahead_bytes=1)
    ahead = ReadAhead(spans[0], num_readers=2)
    reading.close()
    ahead.close()
    assert not any(thread.is_alive() for thread in [*reading._threads, *ahead._threads])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spans_are_copied_to_a_gpu(spans: tuple[dict[str, FileSpan], dict[str, bytes]]) -> None:
    reading = DeviceReaders(spans[0], torch.device("cuda"))
    try:
        for name in spans[0]:
            assert bytes(reading.take(name).cpu().numpy()) == spans[1][name]
    finally:
        reading.close()
