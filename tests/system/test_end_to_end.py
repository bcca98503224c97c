"""Tests the whole path over processes: both clients, reflection, health, bad input, clean errors at start-up."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cluster.cli.main import main
from penstock import Client
from penstock.bench.results.result_file import read_result
from penstock.config import RouterConfig
from penstock.errors import InvalidInput, ModelNotFound
from penstock.types import Grammar, GrammarKind, Role
from tests.support.engine.checkpoints import make_checkpoint
from tests.support.plain_processes import Deployment, wait_until_followed
from tests.support.serving import worker_config

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "penstock-tiny"
PROMPT = "Once upon a time there was a small fox who lived near a river. " * 4
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Service:
    grpc: str
    http: str


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Deployment() as deployment:
        configs = [worker_config(role, MODEL, decode={"placement": "remote"}) for role in (Role.PREFILL, Role.DECODE)]
        # New Pythons, because forks, as in most other tests, would hide a missing import.
        workers = deployment.start_workers(configs, fresh=True)
        addresses = tuple(worker.address for worker in workers)
        settings = RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=addresses)
        router = deployment.start_router(settings, fresh=True)
        wait_until_followed(router, len(workers))
        yield Service(router.address, router.http)


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.grpc, timeout_s=TIMEOUT_S) as made:
        yield made


@pytest.fixture
def openai_client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{service.http}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)


def test_a_stream_adds_up_to_the_whole_answer(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=150, temperature=0.0, ignore_eos=True)
    chunks = list(client.generate(PROMPT, max_tokens=150, temperature=0.0, ignore_eos=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum(len(chunk.token_ids) for chunk in chunks) == len(whole.token_ids)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len(chunks) > 1  # how many tokens a chunk has depends on which side is slower


def test_cached_pages_are_not_transferred_again(client: Client) -> None:
    fresh = "A new tale about a red kite and the windy hill behind the old mill. " * 8
    first = client.complete(fresh, max_tokens=4)
    again = client.complete(fresh, max_tokens=4)
    assert first.timing is not None
    assert again.timing is not None
    assert (first.timing.pages_moved > 5, first.timing.prefill_worker) == (True, "prefill")
    assert again.timing.pages_moved <= 2
    assert again.usage is not None
    assert again.usage.cached_tokens > 0.8 * again.usage.prompt_tokens


def test_a_decision_record_explains_the_placement(client: Client, openai_client: openai.OpenAI) -> None:
    prompt = "A third tale, of a grey goose that counted the clouds above the sea. " * 8

    def decision() -> dict[str, Any]:
        explained = client.complete(prompt, max_tokens=4, explain=True).decision
        assert explained is not None
        return dict(explained)

    first, again = decision(), decision()
    deadline_s = time.monotonic() + TIMEOUT_S
    while not again["completions"][0]["attempts"][0]["predicted"]["decode_cached_tokens"]:
        assert time.monotonic() < deadline_s, "no event of the first request's pages has arrived"
        time.sleep(0.05)
        again = decision()
    predicted, actual = first["completions"][0]["attempts"][0]["predicted"], first["completions"][0]["actual"]
    assert (actual["prefill_worker"], actual["decode_worker"]) == (predicted["prefill"], "decode")
    assert actual["pages_moved"] > 5
    predicted, actual = again["completions"][0]["attempts"][0]["predicted"], again["completions"][0]["actual"]
    assert predicted["decode_cached_tokens"] > 100
    assert actual["decode_cached_tokens"] >= predicted["decode_cached_tokens"] - 16
    assert actual["first_token_ms"] > 0
    assert client.complete(prompt, max_tokens=4).decision is None
    for stream in (False, True):
        answer = openai_client.completions.create(
            model="penstock-tiny", prompt=prompt, stream=stream, extra_headers={"x-penstock-explain": "1"}
        )
        last = list(answer)[-1] if stream else answer
        assert last.model_extra is not None
        assert last.model_extra["penstock"]["decisions"][0]["policy"] == "kv-aware"


def test_the_openai_client_gets_what_the_grpc_client_gets(client: Client, openai_client: openai.OpenAI) -> None:
    same = {"max_tokens": 24, "temperature": 0.0}
    wanted = client.complete(PROMPT, **same)
    answer = openai_client.completions.create(model="penstock-tiny", prompt=PROMPT, **same)
    assert answer.choices[0].text == wanted.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    stream = openai_client.completions.create(model="penstock-tiny", prompt=PROMPT, stream=True, **same)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == wanted.text
    ids = list(client.tokenize(PROMPT).token_ids)
    by_ids = openai_client.completions.create(model="penstock-tiny", prompt=ids, **same)
    assert by_ids.choices[0].text == wanted.text


def test_chat_works_over_http(client: Client, openai_client: openai.OpenAI) -> None:
    question = "What is 4 + 5?"
    chat = openai_client.chat.completions.create(
        model="penstock-tiny", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=30
    )
    answer = chat.choices[0]
    assert answer.finish_reason == "stop"
    assert "9" in (answer.message.content or "")
    stream = openai_client.chat.completions.create(
        model="penstock-tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.message.content
    assert chunks[-1].usage is not None
    assert [model.id for model in openai_client.models.list()] == ["penstock-tiny"]


def test_sampling_extensions_work_over_the_openai_api(openai_client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_tokens": 30, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1}
    first, again = (
        openai_client.completions.create(
            model="penstock-tiny", prompt=PROMPT, max_tokens=30, seed=3, n=2, extra_body=extra
        )
        for _ in range(2)
    )
    assert [choice.finish_reason for choice in first.choices] == ["length", "length"]
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert first.choices[0].text != first.choices[1].text


def test_outputs_match_their_schema_over_both_apis(client: Client, openai_client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "bear"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["animal", "age"],
        "additionalProperties": False,
    }
    answer = openai_client.chat.completions.create(
        model="penstock-tiny",
        messages=[{"role": "user", "content": PROMPT}],
        n=3,
        seed=5,
        response_format={"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}},
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), schema)
    assert len({choice.message.content for choice in answer.choices}) > 1
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    by_grpc = client.complete(PROMPT, seed=5, grammar=grammar)
    by_http = openai_client.completions.create(
        model="penstock-tiny", prompt=PROMPT, seed=5, max_tokens=100, extra_body={"guided_json": schema}
    )
    assert by_grpc.text == by_http.choices[0].text
    jsonschema.validate(json.loads(by_grpc.text), schema)
    pieces = [chunk.text for chunk in client.generate(PROMPT, seed=5, grammar=grammar)]
    assert "".join(pieces) == by_grpc.text
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be enforced: Invalid type: strin"):
        client.complete(PROMPT, grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strin"}'))


@pytest.mark.parametrize("target", ["--url", "--grpc"])
def test_the_load_generator_receives_every_stream_whole(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    address = service.http if target == "--url" else service.grpc
    load = ["--mix", "chat", "--requests", "8", "--input-tokens", "150", "--output-tokens", "6", "--max-context", "600"]
    pace = ["--think", "0", "--concurrency", "3", "--slo", "e2e=300", "--out", str(tmp_path), "--quiet"]
    assert main(["bench", "run", target, address, *load, *pace]) == 0
    assert "SLO e2e=300: 8 of 8 met it (100.0%)" in capsys.readouterr().out
    (point,) = read_result(tmp_path).points
    assert point.figures.endings == {"complete": 8}
    assert point.figures.hit_rate is not None
    assert all(each.prompt_tokens == each.planned_input_tokens for each in point.run.requests)
    assert all(each.output_tokens == each.planned_output_tokens for each in point.run.requests)


def test_stop_strings_end_the_text_before_them(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=40, temperature=0.0).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    stopped = client.complete(PROMPT, max_tokens=40, temperature=0.0, stop=[stop])
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"


def test_a_generic_grpc_client_works_by_reflection(service: Service) -> None:
    """The call uses no stubs of Penstock; the descriptors come from the server."""
    with grpc.insecure_channel(service.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "penstock.v1.Inference" in database.get_services()
        pool = DescriptorPool(database)
        method = pool.FindServiceByName("penstock.v1.Inference").methods_by_name["Generate"]
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/penstock.v1.Inference/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )
        asked = request(text=PROMPT)
        asked.sampling.max_tokens = 5
        messages = list(call(asked, timeout=TIMEOUT_S))
        assert sum(len(message.token_ids) for message in messages) == 5
        assert messages[-1].usage.completion_tokens == 5


def test_health_and_metrics_are_served(service: Service, client: Client) -> None:
    client.complete("Hello", max_tokens=2)
    assert httpx.get(f"http://{service.http}/health", timeout=TIMEOUT_S).status_code == 200
    metrics = httpx.get(f"http://{service.http}/metrics", timeout=TIMEOUT_S).text
    assert "vllm:time_to_first_token_seconds_bucket" in metrics
    with grpc.insecure_channel(service.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([1] * 3000, {}, "prompt"),
        ("hi", {"max_tokens": 100_000}, "sampling.max_tokens"),
        ("hi", {"temperature": -0.5}, "sampling.temperature"),
        ([99_999], {}, "token_ids"),
    ],
)
def test_bad_input_is_refused_and_the_service_stays_up(
    client: Client, prompt: str | list[int], options: dict[str, float], field: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        client.complete(prompt, **options)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert client.complete("still there?", max_tokens=1).token_ids


def test_an_unknown_model_is_not_found(client: Client, openai_client: openai.OpenAI) -> None:
    with pytest.raises(ModelNotFound, match=r"gpt-17.*penstock-tiny"):
        client.complete("hi", model="gpt-17")
    with pytest.raises(openai.NotFoundError, match="gpt-17"):
        openai_client.completions.create(model="gpt-17", prompt="hi")


def run_module(module: str, config: dict[str, object], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", module, "--config", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_a_missing_shard_is_one_clear_line(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model", max_shard_size="20KB")
    next(iter(sorted(model.glob("model-*.safetensors")))).unlink()
    config = worker_config(Role.DECODE, model).model_dump(mode="json")
    done = run_module("decode_worker", config, tmp_path)
    assert done.returncode == 2
    assert "model-00001" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = worker_config(Role.DECODE, MODEL).model_dump(mode="json") | {"port": port}
        done = run_module("decode_worker", config, tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert f"port = {port}" in done.stderr
