"""Tests the invariant: disaggregated == colocated == single process == `transformers`, token for token.

Real workers with their gRPC servers and transports run in this process. One checkpoint of each family with random
weights in fp32, and prompts of many lengths around the page size, are served in every possible way.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.generate import generate
from kv_transfer.transports import nixl_agent
from penstock.config import EngineConfig
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2
from tests.support.engine.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.support.engine.int8_activations import SCHEMES, quantize_checkpoint
from tests.support.serving import GREEDY, SALT, Caller, caller, wait_until_empty, worker_config, workers

pytestmark = pytest.mark.processes

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
# These values are exact in single precision, the precision of the wire format.
SEEDED = SamplingParams(max_tokens=16, temperature=0.75, top_p=0.875, top_k=50, seed=7, ignore_eos=True)
PENALIZED = replace(SEEDED, repetition_penalty=1.25, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={5: 3.0})


def make_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts with lengths around a page's end; the last two share a long prefix with the third."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(2, vocab_size), k=length) for length in (1, 15, 64, 16, 17, 47, 100)]
    return [*prompts, prompts[2][:48] + prompts[5][:9], prompts[2][:33]]


@functools.cache
def families(folder: Path) -> dict[str, Path]:
    made = {family: make_checkpoint(family, folder / family) for family in FAMILIES}
    return made | {"bundled": BUNDLED}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    return families(tmp_path_factory.mktemp("checkpoints"))


@functools.cache
def reference_engine(model: Path) -> Engine:
    return Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1, dtype="float32"))


def single_process(model: Path, prompt: list[int], sampling: SamplingParams) -> list[int]:
    return generate(reference_engine(model), prompt, sampling, SALT, use_prefix_cache=False)


def by_transformers(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        done = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            repetition_penalty=1.0,
        )
        outputs.append(done[0, len(prompt) :].tolist())
    return outputs


async def ask_all(router: Caller, prompts: list[list[int]], sampling: SamplingParams, prefill: list) -> list[list[int]]:
    """Submits all prompts at once, so that they share batches."""
    streams = [router.submit(prompt, sampling, prefill) for prompt in prompts]
    return [(await router.answer(stream)).token_ids for stream in streams]


@pytest.mark.parametrize("family", [*FAMILIES, "bundled"])
async def test_every_way_to_serve_gives_the_same_tokens(family: str, checkpoints: dict[str, Path]) -> None:
    model = checkpoints[family]
    prompts = make_prompts(VOCAB_SIZE)
    wanted = by_transformers(model, prompts, GREEDY.max_tokens)
    assert [single_process(model, prompt, GREEDY) for prompt in prompts] == wanted
    fp32: dict[str, object] = {"dtype": "float32"}
    verified: dict[str, object] = {"checksums": True}
    async with workers(
        worker_config(Role.PREFILL, model, engine=fp32, prefill={"max_batch_tokens": 40}, transfer=verified),
        worker_config(Role.DECODE, model, engine=fp32, transfer=verified),
    ) as (prefill, decode):
        async with caller(decode) as router:
            assert await ask_all(router, prompts, GREEDY, [prefill]) == wanted
            # The second round finds pages cached at both ends, and only the rest is moved.
            assert await ask_all(router, prompts, GREEDY, [prefill]) == wanted
            # Without a prefill worker, the same worker computes prompts itself.
            assert await ask_all(router, prompts, GREEDY, []) == wanted
        await wait_until_empty(prefill, decode)


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_quantized_inputs_give_the_same_tokens_everywhere(scheme: str, tmp_path: Path) -> None:
    """In bf16 the kernels multiply integers; the prompt is served disaggregated in chunks, with cached pages, and
    colocated."""
    whole = make_checkpoint("llama", tmp_path / "whole", hidden_size=64, intermediate_size=128, head_dim=32)
    model, _ = quantize_checkpoint(whole, tmp_path / scheme, scheme)
    prompts = make_prompts(VOCAB_SIZE)
    bf16: dict[str, object] = {"dtype": "bfloat16"}
    single = Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1, dtype="bfloat16"))
    wanted = [generate(single, prompt, SEEDED, SALT, use_prefix_cache=False) for prompt in prompts]
    async with workers(
        worker_config(Role.PREFILL, model, engine=bf16, prefill={"max_batch_tokens": 40}),
        worker_config(Role.DECODE, model, engine=bf16),
    ) as (prefill, decode):
        async with caller(decode) as router:
            assert await ask_all(router, prompts, SEEDED, [prefill]) == wanted
            assert await ask_all(router, prompts, SEEDED, [prefill]) == wanted
            assert await ask_all(router, prompts, SEEDED, []) == wanted
        await wait_until_empty(prefill, decode)


@pytest.mark.parametrize("sampling", [GREEDY, PENALIZED], ids=["greedy", "penalized"])
async def test_a_split_prompt_gives_the_same_tokens(sampling: SamplingParams, checkpoints: dict[str, Path]) -> None:
    """A prefill worker computes the first half of each prompt and the decode worker the rest, both in small chunks,
    with pages of the same and of different sizes, cold and with cached pages at both ends."""
    model = checkpoints["llama"]
    prompts = make_prompts(VOCAB_SIZE, seed=3)
    wanted = [single_process(model, prompt, sampling) for prompt in prompts]
    small = {"placement": "split", "max_batch_tokens": 24, "max_batch_sequences": 8}
    verified: dict[str, object] = {"checksums": True}
    for page_size in (16, 8):
        fp32: dict[str, object] = {"dtype": "float32"}
        async with workers(
            worker_config(
                Role.PREFILL,
                model,
                engine=fp32 | {"page_size": page_size},
                prefill={"max_batch_tokens": 24},
                transfer=verified,
            ),
            worker_config(Role.DECODE, model, engine=fp32, decode=small, transfer=verified),
        ) as (prefill, decode):
            async with caller(decode) as router:
                assert await ask_all(router, prompts, sampling, [prefill]) == wanted
                assert await ask_all(router, prompts, sampling, [prefill]) == wanted
                answer = await router.answer(router.submit([9] * 100, sampling, [prefill]))
                assert answer.timing is not None
                chosen = answer.timing.prices[0]
                assert (chosen.place, chosen.remote_tokens, answer.timing.pages_moved) == ("split", 48, 3)
                assert answer.timing.prefill_worker == "prefill"
            await wait_until_empty(prefill, decode)


async def test_a_split_prompt_whose_prefill_worker_is_lost_is_computed_locally(checkpoints: dict[str, Path]) -> None:
    model = checkpoints["llama"]
    prompt = make_prompts(VOCAB_SIZE, seed=3)[6]
    wanted = single_process(model, prompt, SEEDED)
    gone = worker_pb2.PrefillCandidate(worker_id="gone", epoch=1, address="127.0.0.1:9")
    async with workers(worker_config(Role.DECODE, model, decode={"placement": "split"})) as (decode,):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(prompt, SEEDED, [gone]))
            assert answer.token_ids == wanted
            assert answer.timing is not None
            assert (answer.timing.prices[0].place, answer.timing.prefill_worker) == ("local", "decode")
        await wait_until_empty(decode)


@pytest.mark.parametrize("sampling", [SEEDED, PENALIZED], ids=["seeded", "penalized"])
@pytest.mark.parametrize("transport", ["shm", "shm by layers", "torch", "nixl"])
async def test_seeded_sampling_over_each_transport(
    sampling: SamplingParams, transport: str, checkpoints: dict[str, Path]
) -> None:
    if transport == "nixl" and not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed")
    model = checkpoints["qwen3"]
    prompts = make_prompts(VOCAB_SIZE, seed=1)
    wanted = [single_process(model, prompt, sampling) for prompt in prompts]
    wire: dict[str, object] = {"transport": transport, "checksums": True}
    if by_layers := transport.endswith("by layers"):
        wire |= {"transport": "shm", "layer_groups": 2}
    async with workers(
        worker_config(Role.PREFILL, model, prefill={"max_batch_tokens": 24}, transfer=wire),
        worker_config(Role.DECODE, model, transfer=wire),
    ) as (prefill, decode):
        async with caller(decode) as router:
            assert await ask_all(router, prompts, sampling, [prefill]) == wanted
            moved = router.submit([9] * 40, sampling, [prefill])
            answer = await router.answer(moved)
            assert answer.timing is not None
            assert (answer.timing.pages_moved, answer.timing.prefill_worker) == (3, "prefill")
            stats = prefill.worker._sender._local.stats
            for seed in range(50):  # until a destination is known before the last chunk of these small layers
                if not by_layers or stats.num_groups_ahead:
                    break
                prompt = [seed + 10] * 300
                answer = await router.answer(router.submit(prompt, sampling, [prefill]))
                assert answer.token_ids == single_process(model, prompt, sampling)
        assert (stats.num_groups_ahead > 0) == by_layers
        await wait_until_empty(prefill, decode)


async def test_preemption_loses_no_token(checkpoints: dict[str, Path]) -> None:
    """There are pages for about two of six sequences, which therefore preempt each other."""
    model = checkpoints["llama"]
    sampling = replace(GREEDY, max_tokens=60)
    prompts = [[seed] * 40 for seed in range(2, 8)]
    wanted = [single_process(model, prompt, sampling) for prompt in prompts]
    async with workers(
        worker_config(Role.PREFILL, model),
        worker_config(Role.DECODE, model, engine={"num_pages": 14, "prefix_caching": False}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for _ in range(50):  # repeats until three of them run at once, which happens unless their prefills are late
                streams = [router.submit(prompt, sampling, [prefill]) for prompt in prompts]
                answers = [await router.answer(stream) for stream in streams]
                assert [answer.token_ids for answer in answers] == wanted
                if any(answer.timing.num_preemptions for answer in answers if answer.timing):
                    break
            else:
                raise AssertionError("no sequence was preempted")
        await wait_until_empty(prefill, decode)


@pytest.mark.parametrize("with_disk", [False, True], ids=["host", "host and disk"])
async def test_pages_loaded_from_lower_tiers_give_the_same_tokens(
    with_disk: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Repeats prompts that do not fit into either pool; the decode worker preempts, too."""
    model = checkpoints["llama"]
    prompts = [[seed] * 20 + list(range(2, 60)) for seed in range(2, 8)]
    wanted = [single_process(model, prompt, SEEDED) for prompt in prompts]
    page_bytes = reference_engine(model).layout.page_bytes
    tiers: dict[str, object] = {"dtype": "float32", "host_memory_bytes": 100 * page_bytes, "zero_freed_pages": True}
    if with_disk:
        tiers |= {"host_memory_bytes": 3 * page_bytes, "disk_bytes": 100 * page_bytes, "disk_path": str(tmp_path)}
    async with workers(
        worker_config(Role.PREFILL, model, engine={"num_pages": 8, **tiers}),
        worker_config(Role.DECODE, model, engine={"num_pages": 14, **tiers}),
    ) as (prefill, decode):
        async with caller(decode) as router:
            for candidates in ([prefill], [], [prefill]):
                assert await ask_all(router, prompts, SEEDED, candidates) == wanted
        for worker in (prefill, decode):
            stats = worker.worker.load.cache
            assert (stats.disk_hits if with_disk else stats.host_hits) > 0, stats
        await wait_until_empty(prefill, decode)


async def test_a_resumed_request_continues_where_it_stopped(checkpoints: dict[str, Path]) -> None:
    """Resubmits the prompt with its emitted tokens, as a router does when a decode worker is lost."""
    model = checkpoints["mistral"]
    prompt = make_prompts(VOCAB_SIZE)[6]
    wanted = single_process(model, prompt, PENALIZED)
    async with workers(worker_config(Role.PREFILL, model), worker_config(Role.DECODE, model)) as (prefill, decode):
        async with caller(decode) as router:
            for emitted in (1, 5, 15):
                for candidates in ([prefill], []):
                    stream = router.submit(
                        prompt + wanted[:emitted], PENALIZED, candidates, num_prompt_tokens=len(prompt)
                    )
                    assert (await router.answer(stream)).token_ids == wanted[emitted:]


async def test_logprobs_equal_those_of_transformers(checkpoints: dict[str, Path]) -> None:
    model = checkpoints["qwen2"]
    sampling = replace(GREEDY, max_tokens=4, logprobs=3)
    prompt = make_prompts(VOCAB_SIZE)[5]
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    async with workers(worker_config(Role.PREFILL, model), worker_config(Role.DECODE, model)) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(prompt, sampling, [prefill]))
    with torch.no_grad():
        logits_TV = hf(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
    assert len(answer.logprobs) == 4
    for position, logprob in enumerate(answer.logprobs):
        row = logits_TV[len(prompt) - 1 + position]
        assert logprob.token_id == answer.token_ids[position]
        assert logprob.logprob == pytest.approx(row[logprob.token_id].item(), abs=1e-4)
        assert [top.token_id for top in logprob.top] == row.topk(3).indices.tolist()
