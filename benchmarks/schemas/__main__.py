"""Sends every schema of two public suites to a deployment, and checks that every output is valid against its schema.

Two prefill and two decode workers with the bundled model serve behind a router. Each schema is answered greedily and
with a seed, and with the same seed again while one decode worker is killed; the last two must have the same tokens.
Schemas with keywords that are not supported are refused by name, and counted. An output that `max_tokens` cuts is not
valid JSON: a bias for tokens that only close texts, lists and objects, and a penalty for repeated ones, make most
outputs of so small a model end in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.schemas.judge import problem_of
from benchmarks.schemas.suites import SCHEMA_STORE, TEST_SUITE, SuiteSchema, download, read_suites
from penstock import AsyncClient
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.errors import InvalidInput
from penstock.text.grammars import FIELD
from penstock.types import FinishReason, Grammar, GrammarKind, Role
from tests.support.plain_processes import Deployment, Process, wait_until_followed

FOLDER = Path(__file__).resolve().parents[2] / ".venv-conformance" / "suites"
PROMPT = "Answer in JSON: "
CONCURRENCY = 24
TIMEOUT_S = 300.0
CLOSING_BIAS = 4.0
FREQUENCY_PENALTY = 0.5
TEMPERATURES = {"greedy": 0.0, "seeded": 1.0}
KINDS = ("valid", "cut by max_tokens", "invalid")


@dataclass(frozen=True, slots=True)
class SchemaOutput:
    token_ids: tuple[int, ...]
    text: str
    is_whole: bool
    num_redispatches: int

    def problem(self, given: SuiteSchema) -> str | None:
        return problem_of(given.draft, given.schema, self.text)


Answers = dict[int, SchemaOutput | InvalidInput]  # answers by place in the list of schemas


class Fleet:
    """Two prefill and two decode workers and a router over them."""

    def __init__(self, deployment: Deployment) -> None:
        engine = EngineConfig(model=str(BUNDLED), num_pages=2048, num_threads=1, dtype="float32", device="cpu")
        workers = [
            WorkerConfig(
                worker_id=f"{role.value}-{number}", role=role, engine=engine, decode=DecodeConfig(placement="remote")
            )
            for role in Role
            for number in range(2)
        ]
        processes = deployment.start_workers(workers)
        self.decode: Sequence[Process] = processes[2:]
        self.router = deployment.start_router(
            RouterConfig(
                model=str(BUNDLED),
                grpc_port=0,
                http_port=0,
                workers=tuple(process.address for process in processes),
                default_timeout_s=TIMEOUT_S,
            )
        )
        wait_until_followed(self.router, len(processes))


def closing_bias() -> dict[int, float]:
    """Returns a bias for the tokens that hold nothing but closing characters of JSON."""
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    texts = {token_id: tokenizer.decode([token_id]) for token_id in tokenizer.get_vocab().values()}
    return {token_id: CLOSING_BIAS for token_id, text in texts.items() if text and set(text) <= set('"}]')}


async def answer_all(
    fleet: Fleet,
    schemas: Sequence[SuiteSchema],
    places: Sequence[int],
    way: str,
    max_tokens: int,
    victim: Process | None,
) -> Answers:
    """Answers the schemas at these places; kills the victim, if any, once a quarter of them are answered."""
    answers: Answers = {}
    bias, limit = closing_bias(), asyncio.Semaphore(CONCURRENCY)

    async def answer(client: AsyncClient, place: int) -> None:
        async with limit:
            try:
                result = await client.complete(
                    PROMPT,
                    max_tokens=max_tokens,
                    temperature=TEMPERATURES[way],
                    seed=place,
                    logit_bias=bias,
                    frequency_penalty=FREQUENCY_PENALTY,
                    grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schemas[place].schema)),
                )
            except InvalidInput as error:
                if error.field != FIELD:
                    raise
                answers[place] = error
                return
        [found] = result.completions
        is_whole = found.finish_reason is not FinishReason.LENGTH
        answers[place] = SchemaOutput(found.token_ids, found.text, is_whole, found.timing.num_redispatches)
        if victim is not None and len(answers) == len(places) // 4:
            victim.kill()

    async with AsyncClient(fleet.router.address, timeout_s=TIMEOUT_S) as client:
        async with asyncio.TaskGroup() as group:
            for place in places:
                group.create_task(answer(client, place))
    return answers


def count(schemas: Sequence[SuiteSchema], answers: Answers, way: str) -> Counter[tuple[str, str]]:
    """Returns how many outputs of each suite are valid, cut or invalid; prints why an output is invalid."""
    counts: Counter[tuple[str, str]] = Counter()
    for place, found in sorted(answers.items()):
        each = schemas[place]
        if isinstance(found, InvalidInput):
            counts[each.suite, "refused"] += 1
        elif not found.is_whole:
            counts[each.suite, "cut by max_tokens"] += 1
        elif (problem := found.problem(each)) is not None:
            counts[each.suite, "invalid"] += 1
            print(f"{way}: {each.suite}, {each.place} ({each.draft}): {problem[:200]}\n  {found.text[:200]}")
        else:
            counts[each.suite, "valid"] += 1
    return counts


def measure(schemas: Sequence[SuiteSchema], max_tokens: int) -> list[Row]:
    """Returns the counts of the suites, greedy, seeded, and across the loss of a worker."""
    rows = []
    with Deployment() as deployment:
        fleet = Fleet(deployment)
        answers: dict[str, Answers] = {}
        places: Sequence[int] = range(len(schemas))
        for way in TEMPERATURES:
            answers[way] = asyncio.run(answer_all(fleet, schemas, places, way, max_tokens, None))
            places = [place for place, found in answers[way].items() if isinstance(found, SchemaOutput)]
            rows += count_rows(schemas, answers[way], way)
        killed = asyncio.run(answer_all(fleet, schemas, sorted(places), "seeded", max_tokens, fleet.decode[0]))
    rows += count_rows(schemas, killed, "seeded, a worker killed")
    equal = sum(_tokens(killed[place]) == _tokens(answers["seeded"][place]) for place in places)
    rows.append(Row("same tokens as without the kill", equal, "outputs", "all", len(places)))
    moved = sum(isinstance(found, SchemaOutput) and found.num_redispatches > 0 for found in killed.values())
    rows.append(Row("continued at the other worker", moved, "outputs"))
    return rows


def _tokens(found: SchemaOutput | InvalidInput) -> tuple[int, ...] | None:
    return found.token_ids if isinstance(found, SchemaOutput) else None


def count_rows(schemas: Sequence[SuiteSchema], answers: Answers, way: str) -> list[Row]:
    counts, rows = count(schemas, answers, way), []
    for suite in (TEST_SUITE, SCHEMA_STORE):
        num_supported = sum(counts[suite, kind] for kind in KINDS)
        rows += [
            Row(f"{suite}, {way}, {kind}", counts[suite, kind], "outputs", "supported", num_supported) for kind in KINDS
        ]
        if counts[suite, "refused"]:
            num_asked = num_supported + counts[suite, "refused"]
            rows.append(Row(f"{suite}, refused by name", counts[suite, "refused"], "schemas", "all", num_asked))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schemas", description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--suites", type=Path, default=FOLDER, help="folder into which the suites are downloaded")
    parser.add_argument("--every", type=int, default=1, help="take only each n-th schema, and publish nothing")
    args = parser.parse_args(argv)
    args.suites.mkdir(parents=True, exist_ok=True)
    download(args.suites)
    schemas = read_suites(args.suites)[:: args.every]
    rows = measure(schemas, args.max_tokens)
    (publish if args.every == 1 else show)(
        "schemas", f"2 prefill and 2 decode workers, fp32, max_tokens {args.max_tokens}", rows
    )
    wrong = sum(row.value for row in rows if row.metric.endswith(", invalid"))
    [equal] = (row.ratio for row in rows if row.metric == "same tokens as without the kill")
    return 0 if not wrong and equal == 1.0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
