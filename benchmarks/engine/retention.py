"""Measures the hit shares of eviction orders at several cache sizes (`make bench-retention`).

Traces come from the folder in PENSTOCK_TRACES: agents' sessions, from whose gaps the eviction order learns, and a chat
service's requests, which name no session, so that both orders must evict alike. A trace is replayed through one page
pool and prefix cache in virtual time. Requests run one after another and need no pages outside the cache, so a figure
depends only on the eviction order; the ideal is that of a cache that evicts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.report import Curves, Row, publish
from engine.cache.prefix_cache import PrefixCache
from penstock.bench.traces.read import read_trace
from penstock.bench.traces.record import TraceRecord
from penstock.config.retention import RetentionConfig
from penstock.errors import InvalidInput
from penstock.kv.kv_hints import KvHints
from penstock.types import PageHash

TRACES = {"agents": "agents_sessions_40.jsonl.gz", "chat": "mooncake_conversation_first3000.jsonl.gz"}
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6)  # shares of the pages that an unlimited cache would hold


@dataclass(frozen=True, slots=True)
class Order:
    """An eviction order, and whether requests name their sessions and announce their end."""

    name: str
    config: RetentionConfig
    names_sessions: bool = True
    ends_sessions: bool = False  # the last turn of each session has the hint `end_session`


ORDERS = (
    Order("lru", RetentionConfig(eviction="lru"), names_sessions=False),
    Order("reuse", RetentionConfig()),
    Order("reuse, ends known", RetentionConfig(), ends_sessions=True),
)


def hit_share(records: Sequence[TraceRecord], num_pages: int, order: Order) -> float:
    """Returns the share of prompt tokens that hit in a cache of `num_pages`; a page is a block of the trace."""
    now_s = 0.0
    cache = PrefixCache(num_pages, records[0].block_tokens, retention=order.config, clock=lambda: now_s)
    pool = cache.pool
    last_turns = {_session(record): index for index, record in enumerate(records)}
    num_hits = num_asked = 0
    for index, record in enumerate(records):
        now_s = record.arrival_s
        hashes = [PageHash(block.to_bytes(16)) for block in record.block_ids()]
        num_asked += len(hashes)
        hashes = hashes[:num_pages]
        pages = cache.match(hashes)
        num_hits += len(pages)
        pages += pool.allocate(len(hashes) - len(pages))
        cache.insert(hashes, pages)
        session = _session(record) if order.names_sessions else ""
        if session:
            ends = order.ends_sessions and last_turns[session] == index
            cache.hints.apply("", KvHints(session=session, end_session=ends), hashes, now_s)
        pool.release(pages)
    return num_hits / max(1, num_asked)


def ideal_share(records: Sequence[TraceRecord]) -> float:
    """Returns the share that hits in one unlimited cache."""
    return hit_share(records, len({block for record in records for block in record.block_ids()}), ORDERS[0])


def _session(record: TraceRecord) -> str:
    return f"{record.session}/{record.agent}" if record.session else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.retention", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the table and write nothing")
    options = parser.parse_args()
    rows: list[Row] = []
    curves: list[Curves] = []
    for name, file in TRACES.items():
        records = read_trace(file).records
        num_distinct = len({block for record in records for block in record.block_ids()})
        rows.append(Row(f"{name}: unlimited cache", ideal_share(records), "share of prompt tokens"))
        lines: dict[str, list[tuple[float, float]]] = {order.name: [] for order in ORDERS}
        for share in SHARES:
            num_pages = int(share * num_distinct)
            found = {order.name: hit_share(records, num_pages, order) for order in ORDERS}
            for order, value in found.items():
                lines[order].append((num_pages * records[0].block_tokens, round(value, 4)))
                if order != "lru":
                    label = f"{name}: {order}, cache of {share:.0%} ({num_pages} pages)"
                    rows.append(Row(label, value, "share of prompt tokens", "lru", found["lru"]))
        curves.append(Curves(f"Hits of {name}", "tokens in the cache", "share of prompt tokens", lines))
    if options.dry_run:
        for row in rows:
            print(f"{row.metric:60} {row.value:.4f} {row.baseline_value or 0:.4f}")
        return
    publish("retention", f"recorded traces through one page pool: {', '.join(TRACES.values())}", rows, curves=curves)


if __name__ == "__main__":
    try:
        main()
    except InvalidInput as error:
        raise SystemExit(f"{error.message}; set PENSTOCK_TRACES to the folder of the traces") from error
