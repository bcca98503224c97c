"""Compares imported GGUF files with `transformers`' reader of them, and tests what cannot be imported."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from cluster.cli.main import main
from engine.engine import Engine
from engine.generate import generate
from engine.models.config import ModelConfig
from engine.models.gguf.header import read_header
from engine.models.gguf.model import llama3_divisors, make_config
from engine.models.gguf.write_folder import import_gguf
from penstock.config import EngineConfig
from penstock.errors import CheckpointError
from penstock.types import Role, SamplingParams
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint, write_tokenizer
from tests.support.engine.gguf_files import random_blocks, write_gguf
from tests.support.serving import SALT, caller, wait_until_empty, worker_config, workers

PROMPT = [(11 * i) % (VOCAB_SIZE - 2) + 2 for i in range(40)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "initializer_range": 0.05}


def write(tmp_path: Path, family: str, kind: str, **overrides: Any) -> Path:
    checkpoint = make_checkpoint(family, tmp_path / "checkpoint", **overrides)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    write_tokenizer(tmp_path)
    return file


def tokens_of(folder: Path) -> list[int]:
    engine = Engine.load(EngineConfig(model=str(folder), num_pages=16, num_threads=1, dtype="float32"))
    return generate(engine, PROMPT, GREEDY, SALT)


def by_transformers(folder: Path, **options: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(GREEDY.max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return found


@pytest.mark.parametrize(
    ("family", "kind", "overrides"),
    [
        ("llama", "Q8_0", {"tie_word_embeddings": True}),
        ("llama", "Q4_K", WIDE),
        ("llama", "F32", {"attention_bias": False, "num_key_value_heads": 4}),
        ("qwen2", "F16", {"head_dim": 8}),
        ("qwen3", "BF16", {"head_dim": 128, "tie_word_embeddings": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_imported_file_answers_like_transformers(
    family: str, kind: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    file = write(tmp_path, family, kind, **overrides)
    shares: list[float] = []
    made = import_gguf(file, tmp_path / "imported", dtype="float32", on_progress=shares.append)
    assert (shares[-1], shares) == (1.0, sorted(shares))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = weights_of(tmp_path / "imported")
    assert made.num_bytes == sum(tensor.nbytes for tensor in ours.values())
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), name
    assert tokens_of(tmp_path / "imported") == by_transformers(tmp_path, gguf_file=file.name)
    assert ModelConfig.from_folder(tmp_path / "imported").eos_token_ids == {1}


def test_imported_weights_equal_the_stored_ones(tmp_path: Path) -> None:
    """Compares with the checkpoint that the file was made from, so that no reader is trusted with the order of rows."""
    for family in ("llama", "qwen2", "qwen3"):
        folder = tmp_path / family
        folder.mkdir()
        file = write(folder, family, "F32")
        import_gguf(file, folder / "imported", dtype="float32")
        stored, ours = weights_of(folder / "checkpoint"), weights_of(folder / "imported")
        assert ours.keys() == stored.keys()
        assert all(torch.equal(ours[name], stored[name]) for name in stored)


def test_bfloat16_rounds_to_the_nearest_value(tmp_path: Path) -> None:
    file = write(tmp_path, "qwen3", "Q8_0")
    import_gguf(file, tmp_path / "exact", dtype="float32")
    import_gguf(file, tmp_path / "half")
    exact, half = weights_of(tmp_path / "exact"), weights_of(tmp_path / "half")
    assert all(torch.equal(exact[name].bfloat16(), half[name]) for name in exact)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def q4_k_values(block: bytes) -> list[float]:
    """Decodes a block one value at a time, by the format's description."""
    scale, least = struct.unpack("<2e", block[:4])
    packed, nibbles = block[4:16], block[16:]
    values = []
    for index in range(256):
        part = index // 32
        if part < 4:
            own, floor = packed[part] & 63, packed[part + 4] & 63
        else:
            own = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            floor = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        byte = nibbles[part // 2 * 32 + index % 32]
        values.append(scale * own * (byte >> 4 if part % 2 else byte & 15) - least * floor)
    return values


def q6_k_values(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (scale,) = struct.unpack("<e", block[208:])
    values = []
    for index in range(256):
        half, within = divmod(index, 128)
        part, place = divmod(within, 32)
        byte = low[half * 64 + part % 2 * 32 + place]
        bits = (byte >> 4 if part >= 2 else byte & 15) | (high[half * 32 + place] >> 2 * part & 3) << 4
        values.append(scale * scales[index // 16] * (bits - 32))
    return values


@pytest.mark.parametrize(("kind", "decode"), [("Q4_K", q4_k_values), ("Q6_K", q6_k_values)])
def test_blocks_of_q4_k_m_are_decoded_by_the_formats_description(kind: str, decode: Any) -> None:
    stored = GGMLQuantizationType[kind]
    blocks = random_blocks((4, 256), stored, seed=5)
    np.testing.assert_allclose(dequantize(blocks, stored), [decode(row.tobytes()) for row in blocks], rtol=1e-5)


async def test_an_imported_file_is_served_disaggregated(tmp_path: Path) -> None:
    folder = tmp_path / "imported"
    import_gguf(write(tmp_path, "llama", "Q8_0"), folder)
    fp32: dict[str, object] = {"dtype": "float32"}
    async with workers(
        worker_config(Role.PREFILL, folder, engine=fp32), worker_config(Role.DECODE, folder, engine=fp32)
    ) as (prefill, decode):
        async with caller(decode) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY, [prefill]))
        await wait_until_empty(prefill, decode)
    assert answer.token_ids == tokens_of(folder)


def test_llama_3_1_frequencies_become_a_setting(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint")
    write_tokenizer(tmp_path)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", divisors=llama3_divisors(32.0, 10000.0, 16))
    import_gguf(file, tmp_path / "imported")
    rope = ModelConfig.from_folder(tmp_path / "imported").rope
    assert (rope.type, rope.factor, rope.original_context) == ("llama3", 32.0, 8192)
    other = write_gguf(checkpoint, tmp_path / "other.gguf", divisors=[1.5] * 8)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not that of Llama 3\.1"):
        import_gguf(other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_unsupported_files_are_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "llama", "F16")
    for family, overrides, why in (
        ("gemma2", {}, "general.architecture = 'gemma2' is not imported; give a file of llama, qwen2, qwen3"),
        ("llama", {"attention_bias": False, "mlp_bias": True}, "is not part of the model that the metadata describes"),
    ):
        folder = tmp_path / why[:8]
        folder.mkdir()
        with pytest.raises(CheckpointError, match=why):
            import_gguf(write(folder, family, "F32", **overrides), folder / "imported")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing, and a GGUF file holds no tokenizer"):
        import_gguf(file, tmp_path / "imported", tokenizer=tmp_path / "elsewhere")
    assert main(["import-gguf", str(file), str(tmp_path / "imported")]) == 0
    assert "LlamaForCausalLM, 21 tensors" in capsys.readouterr().out
    assert main(["import-gguf", str(file), str(tmp_path / "imported")]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"is a GGUF file; run `penstock import-gguf .*model\.gguf FOLDER`"):
        ModelConfig.from_folder(file)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    data = write(tmp_path, "llama", "Q8_0").read_bytes()
    short = tmp_path / "short.gguf"
    for length in (0, 3, 10, 30, 300, 2000, len(data) // 2, len(data) - 40):
        short.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"is cut short|is not a GGUF file"):
            read_header(short)


def header(*parts: bytes, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header(version=1), "GGUF version 1 is not supported"),
        (header(tensors=1 << 40), "claims a size of 1099511627776 for tensors"),
        (header(values=1 << 40), "claims a size of 1099511627776 for metadata"),
        (header(struct.pack("<Q", 1 << 50), values=1), "for a key of the metadata"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 8, 1 << 30), values=1), "claims a size of 1073741824 for k"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 4, 1 << 60), values=1), "claims a size of"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 9, 4), values=1), "k has the unknown type 9"),
        (header(text(b"k"), struct.pack("<I", 77), values=1), "k has the unknown type 77"),
        (header(text(b"t"), struct.pack("<I", 2000000000), tensors=1), "tensor t has 2000000000 dimensions"),
        (header(text(b"t"), struct.pack("<IQIQ", 1, 1 << 62, 0, 0), tensors=1), "tensor t ends at byte"),
        (header(text(b"t"), struct.pack("<IQIQ", 1, 256, 19, 0), tensors=1), "t is stored as IQ1_S; give a file of"),
        (header(text(b"t"), struct.pack("<IQIQ", 1, 256, 999, 0), tensors=1), "t is stored as type 999"),
        (header(text(b"t"), struct.pack("<IQIQ", 1, 33, 8, 0), tensors=1), "no whole blocks of 32"),
        (header(text(b"\xff"), struct.pack("<I", 4), values=1), "is not UTF-8"),
    ],
)
def test_a_hostile_header_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=why):
        read_header(file)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"llama.block_count": 2**32 - 1}, r"llama\.block_count = 4294967295, and the file has 22 tensors in all"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "'linear' beside rope_freqs.weight"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn' is not imported"),
        ({"llama.attention.head_count": 0}, r"llama\.attention\.head_count = 0: a positive whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, r"epsilon = nan: a positive number is needed"),
    ],
)
def test_invalid_metadata_is_refused_by_key(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint")
    divisors = [1.0] * 8
    header = read_header(write_gguf(checkpoint, tmp_path / "model.gguf", divisors=divisors))
    with pytest.raises(CheckpointError, match=why):
        make_config(replace(header, metadata={**header.metadata, **changed}), divisors, "float32")


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    entries = [text(b"t%d" % number) + struct.pack("<IQIQ", 1, 4096, 0, 0) for number in range(8)]
    file = tmp_path / "shared.gguf"
    file.write_bytes(header(*entries, tensors=8) + bytes(4096 * 4 + 64))
    with pytest.raises(CheckpointError, match="its tensors overlap"):
        read_header(file)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "llama", "Q8_0")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="has 1000 free; make room or name another disk"):
        import_gguf(file, tmp_path / "imported")
    assert not list(tmp_path.glob(".imported*"))
