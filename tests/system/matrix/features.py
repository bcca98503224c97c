"""Defines the features of the matrix: a request for each, long enough to be in flight when its workers are
disturbed."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from penstock.client.results import build_request
from penstock.config import RouterConfig
from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import NO_KV_HINTS, KvHints
from penstock.types import Grammar, GrammarKind, SamplingParams
from router.api import sampling_fields
from router.parsers.parser_choice import ParserChoice, choose_parsers
from router.parsers.tools import ToolFunction
from router.text.conversation import Conversation
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer, with_bad_sequences
from tests.support.engine.adapters import make_adapter
from tests.support.engine.mtp_layers import make_mtp_checkpoint

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
DRAFT, HEAD = MODEL.with_name("penstock-tiny-draft"), MODEL.with_name("penstock-tiny-eagle3")
MTP = Path("mtp")  # as `decode.draft_model`
ADAPTER = "tuned"  # the name of the adapter that one feature asks for
ENGINE = {"max_adapters": 2, "max_adapter_rank": 4}
MAX_TOKENS = 96
PROMPT_TOKENS = 90
WINDOW = 40  # the window of the other model's layers, in tokens
SINKS = {"attention_sinks": 4, "attention_window": WINDOW}  # of an engine
CONTEXT_LENGTH = 2048
# These values are exact in single precision, the precision of the wire format.
_REPETITIVE = json.dumps(  # the grammar forces most of these tokens
    {
        "type": "array",
        "minItems": 40,
        "items": {
            "type": "object",
            "properties": {"number of the item": {"type": "integer"}},
            "required": ["number of the item"],
            "additionalProperties": False,
        },
    }
)
_TAGS = json.dumps(  # free words, a part that must match, free text
    {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "regex", "pattern": "[a-z ,.]{50}"},
                {
                    "type": "tag",
                    "begin": "<note>",
                    "content": {
                        "type": "json_schema",
                        "json_schema": {
                            "type": "object",
                            "properties": {"text": {"type": "string", "pattern": "^[a-z ]{90}$"}},
                            "required": ["text"],
                        },
                    },
                    "end": "</note>",
                },
                {"type": "any_text"},
            ],
        }
    }
)
TOOL = ToolFunction(
    "note",
    {
        "type": "object",
        "properties": {"text": {"type": "string", "pattern": "^[a-z ]{130}$"}, "is_urgent": {"type": "boolean"}},
        "required": ["text", "is_urgent"],
        "additionalProperties": False,
    },
)
CHAT: dict[str, Any] = {  # the answer is a call of the tool
    "messages": [{"role": "user", "content": "Take a note."}],
    "tools": [{"type": "function", "function": {"name": TOOL.name, "parameters": TOOL.parameters}}],
    "tool_choice": {"type": "function", "function": {"name": TOOL.name}},
}
SEEDED = {"temperature": 0.875, "top_p": 0.9375, "seed": 11, "ignore_eos": True}


@dataclass(frozen=True, eq=False)
class Feature:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # in addition to `SEEDED` and max_tokens
    lane: str | None = None
    over_http: bool = False  # it has no gRPC form
    is_batched: bool = False  # the line of an offline batch
    adapter: str = ""
    is_chat: bool = False  # over HTTP: `CHAT` is the prompt
    end_is_late: bool = False  # at a stop string from the second half of its own text
    is_windowed: bool = False  # served by `windowed_model`
    is_alternating: bool = False  # served by `alternating_model`
    has_sinks: bool = False  # served with `SINKS`
    is_mtp: bool = False  # served by `mtp_model`
    num_prompt_tokens: int = PROMPT_TOKENS
    kv_hints: KvHints = NO_KV_HINTS

    @property
    def over_grpc(self) -> bool:
        return not self.over_http and not self.is_batched

    @property
    def scores_prompt(self) -> bool:
        """Returns whether the decode worker computes the whole prompt, whatever is cached."""
        return "prompt_logprobs" in self.options

    @property
    def prompt(self) -> list[int]:
        """Returns a prompt of its own, so that no feature finds another one's pages."""
        if self.is_chat:
            return _chat_tokens()
        # The adapter feature has another feature's prompt, whose pages it must not find.
        name = "seed" if self.adapter else self.name
        number = [*FEATURES, "first", "second", "third"].index(name)
        return [(7 * i + 131 * number) % 900 + 20 for i in range(self.num_prompt_tokens)]

    @property
    def model(self) -> Path:
        if self.is_alternating:
            return alternating_model()
        return windowed_model() if self.is_windowed else mtp_model() if self.is_mtp else MODEL

    @property
    def all_options(self) -> dict[str, Any]:
        return {**SEEDED, "max_tokens": MAX_TOKENS, **self.options}


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("greedy", {"temperature": 0.0}),
        Feature("seed"),
        Feature("n", {"n": 2}),
        Feature("logprobs", {"logprobs": 2}),
        Feature("prompt_logprobs", {"prompt_logprobs": 1}),
        Feature("echo", {"logprobs": 1, "prompt_logprobs": 1}, over_http=True),
        Feature("penalties", {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": 0.25}),
        Feature("logit_bias", {"logit_bias": {300: 4.0, 301: -20.0}}),
        Feature("bad_words", {"bad_words": ["the", "a", "and", "he", "she", "was", "to"]}),
        Feature("allowed_token_ids", {"allowed_token_ids": list(range(260, 500))}),
        Feature("stop", end_is_late=True),
        Feature("include_stop", {"include_stop": True}, end_is_late=True),
        Feature("stop_token_ids", end_is_late=True),
        Feature("keep_special_tokens", {"keep_special_tokens": True, "logit_bias": {1: 6.0}}),
        Feature("min_tokens", {"min_tokens": 80, "ignore_eos": False, "logit_bias": {1: 12.0}}),
        Feature("ignore_eos", {"logit_bias": {1: 6.0}}),
        Feature("lane", lane="interactive"),
        Feature("grammar", {"grammar": Grammar(GrammarKind.REGEX, "[a-z ,.]{600}")}),
        Feature("forced_tokens", {"grammar": Grammar(GrammarKind.JSON_SCHEMA, _REPETITIVE)}),
        Feature("structural_tag", {"grammar": Grammar(GrammarKind.STRUCTURAL_TAG, _TAGS)}),
        Feature("tools", {"ignore_eos": False}, over_http=True, is_chat=True),
        Feature("adapter", adapter=ADAPTER),
        Feature("speculation", {"allowed_token_ids": [300, 301, 302]}),  # a text that often repeats what came before
        Feature("window", is_windowed=True),  # pages behind the window are freed
        Feature("window_share", is_alternating=True),  # only the windowed layers' KV behind the window is freed
        Feature("attention_sinks", has_sinks=True),  # pages between the first ones and the window are freed
        Feature("mtp", is_mtp=True),  # the model's own layer behind the last one drafts
        Feature("mtp_greedy", {"temperature": 0.0}, is_mtp=True),
        Feature("kv_hints", kv_hints=KvHints(session="s", pin_s=60.0, priority=3, prefetch_s=1.0)),
        Feature("batch", is_batched=True),
        Feature("no_speculation", {"allowed_token_ids": [300, 301, 302], "no_speculation": True}),
    )
}


@functools.cache
def adapter_ref() -> AdapterRef:
    """Writes the adapter at its first use. Its values are small, like those of trained adapters."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_adapter(MODEL, folder, rank=4, size=0.15, name=ADAPTER)


@functools.cache
def windowed_model() -> Path:
    """Returns the model with the same weights and a window in every layer."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-windowed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text())
    changed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    left_out = ("attention_bias", "mlp_bias")
    (folder / "config.json").unlink()
    kept = {key: value for key, value in config.items() if key not in left_out}
    (folder / "config.json").write_text(json.dumps(kept | changed))
    return folder


@functools.cache
def alternating_model() -> Path:
    """Returns the model with the same weights, biases of zero, and a window in every layer but the first."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-alternating-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = json.loads((MODEL / "config.json").read_text())
    for file in MODEL.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    [weights] = MODEL.glob("*.safetensors")
    tensors = load_file(weights)
    for layer in range(config["num_hidden_layers"]):
        for name in "qkv":
            rows = tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = rows.new_zeros(rows.shape[0])
    save_file(tensors, folder / weights.name, {"format": "pt"})
    changed = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    }
    kept = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
    (folder / "config.json").write_text(json.dumps(kept | changed))
    return folder


@functools.cache
def mtp_model() -> Path:
    """Returns a random model of GLM's family with the same vocabulary and a layer that predicts further tokens."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-mtp-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": CONTEXT_LENGTH}
    make_mtp_checkpoint("glm4_moe", folder, is_often_right=True, **sizes)
    for file in MODEL.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
    return folder


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@functools.cache
def parser_choice() -> ParserChoice:
    """Returns the formats of the model's output."""
    template = _tokenizer().template
    assert template is not None
    return choose_parsers(template.source)


def call_grammar() -> Grammar:
    """Returns the grammar of outputs that call the tool."""
    source = parser_choice().grammar([TOOL], TOOL.name, special_tokens=_tokenizer().special_tokens)
    assert source is not None
    return Grammar(GrammarKind.LARK, source)


@functools.cache
def _chat_tokens() -> list[int]:
    tools = [
        each | {"function": each["function"] | {"parameters": json.dumps(TOOL.parameters)}} for each in CHAT["tools"]
    ]
    conversation = Conversation(CHAT["messages"], tools)
    return asyncio.run(_tokenizer().encode_chat(conversation, add_special_tokens=False))


def decode_text(token_ids: list[int]) -> str:
    return _tokenizer().spelling.decode(token_ids)


def spelling() -> Any:
    return _tokenizer().spelling


def resolve(options: Mapping[str, Any], num_prompt_tokens: int) -> SamplingParams:
    """Returns the sampling parameters that the router makes of the options."""
    card = ModelCard.load(RouterConfig(model=str(MODEL)))
    sampling = sampling_fields.resolve(
        build_request([0], options).sampling,
        num_prompt_tokens=num_prompt_tokens,
        context_length=CONTEXT_LENGTH,
        vocab_size=card.vocab_size,
        seed=0,
        defaults=card.generation_defaults,
    )
    return asyncio.run(with_bad_sequences(sampling, _tokenizer(), ""))
