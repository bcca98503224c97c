"""Tests what the router reads from a checkpoint folder: tokenizer, chat template, model card."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from penstock.config import RouterConfig
from penstock.errors import CheckpointError, InvalidInput
from router.text.chat_template import ChatTemplate, load_chat_template
from router.text.model_card import ModelCard
from router.text.tokenizer import Tokenizer
from tests.support.router.router_fakes import MODEL

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(name="folder")
def _folder(tmp_path):
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    return tmp_path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("text", ["Hello there", "  two  spaces\n", "日本語 🙂", "x" * 10_000, "<|end|>"])
async def test_prompts_are_encoded_as_transformers_encodes_them(text):
    tokenizer, reference = Tokenizer.load(MODEL), AutoTokenizer.from_pretrained(MODEL)
    token_ids = await tokenizer.encode(text)
    assert token_ids == reference(text)["input_ids"]
    assert tokenizer.spelling.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    tokenizer.close()


async def test_chats_are_rendered_as_transformers_renders_them():
    tokenizer, reference = Tokenizer.load(MODEL), AutoTokenizer.from_pretrained(MODEL)
    chat = [{"role": "system", "content": "Be kind."}, *CHAT, {"role": "assistant", "content": "Yes?"}, *CHAT]
    rendered = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert await tokenizer.encode_chat(chat) == reference(rendered, add_special_tokens=False)["input_ids"]
    tokenizer.close()


def test_a_template_file_takes_precedence_over_the_tokenizers_configuration(folder):
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content | tojson }}")
    assert load_chat_template(folder).render(CHAT) == '<|bos|>"Hi"'


def test_the_default_of_several_templates_is_used(folder):
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert load_chat_template(folder).render(CHAT) == "D"


async def test_chats_to_a_model_without_a_template_are_refused(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = Tokenizer.load(folder)
    with pytest.raises(InvalidInput, match="messages: the model has no chat template; send the prompt as text"):
        await tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('no system please') }}", "refuses them: no system please"),
        ("{{ ''.__class__.__mro__ }}", "refuses them: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses them"),
        ("{{ messages[0].content + 1 }}", "refuses them"),
    ],
)
def test_a_template_cannot_reach_the_interpreter(source, problem):
    with pytest.raises(InvalidInput, match=problem):
        ChatTemplate(source, {}, "x").render(CHAT)


def test_a_template_can_read_the_date():
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}, "x").render(CHAT)) == 4


def test_broken_files_are_reported_by_path(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: line 1 of the chat template: .*correct"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: .*copy the file again"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: .*copy the file again"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is missing"):
        Tokenizer.load(folder)


def card(folder, **settings):
    return ModelCard.load(RouterConfig(model=str(folder), workers=("x:1",), **settings))


def test_the_card_has_name_vocabulary_and_defaults(folder):
    assert (card(MODEL).name, card(MODEL).vocab_size) == ("penstock-tiny", 2048)
    assert card(folder, served_model="mine").name == "mine"
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "x": 1}
    (folder / "generation_config.json").write_text(json.dumps(sampled))
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    assert card(folder).generation_defaults == expected
    edit(folder / "generation_config.json", do_sample=False)
    assert card(folder).generation_defaults == {"repetition_penalty": 1.05}


def test_an_unreadable_card_is_reported(folder):
    edit(folder / "config.json", vocab_size="many")
    with pytest.raises(CheckpointError, match=r"config.json: vocab_size = 'many'"):
        card(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: is missing"):
        card(folder)
