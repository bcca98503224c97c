"""Tests that a request that turns speculation off gets the same tokens without proposals, and is counted apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from decode_worker.server import DecodeServer
from penstock.types import Role, SamplingParams
from tests.support.serving import Caller, wait_until_empty, worker_config, workers

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
PROMPT = [(7 * place) % 900 + 20 for place in range(40)]
# The text repeats itself, so tokens are proposed for it.
ON = SamplingParams(max_tokens=48, ignore_eos=True, seed=11, allowed_token_ids=(300, 301, 302))
OFF = replace(ON, no_speculation=True)


def value(server: DecodeServer, name: str, **labels: str) -> float:
    """Returns the sum of the samples with these labels."""
    samples = [each for family in server.shell.speculation_metrics.registry.collect() for each in family.samples]
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


async def test_a_request_without_speculation_gets_the_same_tokens_and_no_proposals() -> None:
    decode = {"placement": "local", "speculation": "always"}
    config = worker_config(Role.DECODE, MODEL, engine={"dtype": "float32"}, decode=decode)
    async with workers(config) as [server]:
        assert isinstance(server, DecodeServer)
        caller = Caller(server.address)
        try:
            off = await caller.answer(caller.submit(PROMPT, OFF))
            await wait_until_empty(server)
            assert value(server, "vllm:spec_decode_num_drafts_total") == 0
            assert value(server, "penstock:speculation_tokens_total", group="off") == 47  # all but the first
            assert value(server, "penstock:speculation_tokens_total", group="on") == 0

            # An output that continues elsewhere, as after the loss of a worker, keeps the switch.
            resumed = [*PROMPT, *off.token_ids[:20]]
            rest = await caller.answer(caller.submit(resumed, OFF, num_prompt_tokens=len(PROMPT)))
            assert rest.token_ids == off.token_ids[20:]
            await wait_until_empty(server)
            assert value(server, "vllm:spec_decode_num_drafts_total") == 0
            assert value(server, "penstock:speculation_tokens_total", group="off") == 47 + 27

            both = [caller.submit(PROMPT, ON), caller.submit(PROMPT, OFF)]  # in the same steps
            for stream_id in both:
                assert (await caller.answer(stream_id)).token_ids == off.token_ids
            await wait_until_empty(server)
            assert value(server, "vllm:spec_decode_num_accepted_tokens_total", lane="standard") > 0
            assert value(server, "penstock:speculation_tokens_total", group="on") == 47
            for group in ("on", "off"):
                assert value(server, "penstock:speculation_decode_seconds_total", group=group) > 0
        finally:
            await caller.close()


async def test_requests_are_not_compared_where_speculation_is_off() -> None:
    config = worker_config(Role.DECODE, MODEL, engine={"dtype": "float32"}, decode={"placement": "local"})
    async with workers(config) as [server]:
        assert isinstance(server, DecodeServer)
        caller = Caller(server.address)
        try:
            await caller.answer(caller.submit(PROMPT, ON))
            await wait_until_empty(server)
            assert value(server, "penstock:speculation_tokens_total") == 0
        finally:
            await caller.close()
