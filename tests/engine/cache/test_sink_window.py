"""Tests which pages are read with attention sinks, and how batches leave out the pages between."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.windows.sink_window import SinkWindow
from engine.step.batch import build_host_batch
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.types import PageId, RequestId, SamplingParams


def seen_by(position: int, sinks: SinkWindow) -> list[int]:
    """Returns the positions that a token sees, by the definition."""
    size = sinks.page_size
    first = max(0, position - sinks.num_recent + 1) // size * size
    num_sinks = -(-sinks.num_sinks // size) * size
    return [other for other in range(position + 1) if other < num_sinks or other >= first]


@given(
    sinks=st.builds(SinkWindow, st.integers(1, 9), st.integers(1, 20), st.integers(1, 7)),
    chunks=st.lists(
        st.tuples(st.integers(0, 60), st.just(1) | st.integers(1, 25), st.integers(0, 3)), min_size=1, max_size=4
    ),
)
def test_every_token_gets_the_pages_that_it_sees(sinks: SinkWindow, chunks: list[tuple[int, int, int]]) -> None:
    size, work = sinks.page_size, []
    for number, (start, count, most_proposed) in enumerate(chunks):
        num_proposed = most_proposed if count == 1 else 0
        stop = start + count + num_proposed
        pages = [PageId(1000 * (number + 1) + index) for index in range(-(-stop // size))]
        sequence = Sequence(RequestId("r"), [number + 1] * (start + count), 1, SamplingParams(max_tokens=1), b"", pages)
        sequence.num_computed_tokens = start
        gap = sinks.gap(start)
        sequence.drop_pages(gap.stop, sinks.num_sink_pages)
        assert sequence.pages == [PageId(0) if index in gap else page for index, page in enumerate(pages)]
        assert sequence.held_pages == [page for index, page in enumerate(pages) if index not in gap]
        assert len(sequence.held_pages) <= sinks.num_sink_pages + sinks.window.max_pages(stop, count + num_proposed)
        work.append(ScheduledSequence(sequence, count, proposed=(7,) * num_proposed))
    whole, host = build_host_batch(work, size), build_host_batch(work, size, sinks=sinks)
    row_T = np.repeat(np.arange(len(host.context_B)), np.diff(host.query_start_B1))
    before_T = np.repeat(np.arange(len(whole.context_B)), np.diff(whole.query_start_B1))
    for token, position in enumerate(host.positions_T.tolist()):
        row = row_T[token]
        num_seen = host.context_B[row] - (host.query_start_B1[row + 1] - token - 1)
        pages = host.page_table_BW[row]
        seen = [(pages[index // size], index % size) for index in range(num_seen)]
        table = whole.page_table_BW[before_T[token]]
        assert seen == [(table[other // size], other % size) for other in seen_by(position, sinks)]
    assert (np.diff(host.query_start_B1)[: host.num_decodes] == 1).all()
    assert np.diff(host.query_start_B1).max() == host.max_query_len
    for name in ("token_ids_T", "positions_T", "slot_page_T", "slot_offset_T", "sampled_places", "logit_rows_R"):
        np.testing.assert_array_equal(getattr(host, name), getattr(whole, name))
