"""Tests what pages claim: commands parse, files exist, and figures of the tuning guide follow from the code."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.cli import main as cli
from cluster.cli.catalog import find_group
from engine.cache.kv_layout import KVLayout
from penstock.config import ServeConfig
from penstock.config.files import parse, read
from penstock.sizing.model_shape import find_shape

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
TUNING = DOCS / "tuning.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def command_lines(page: Path) -> Iterator[str]:
    """Yields the commands of a page's blocks, with continued lines joined."""
    for block in re.findall(r"(?ms)^```(?:console)?\n(.*?)^```", page.read_text()):
        yield from (line.strip() for line in re.sub(r"\\\n", " ", block).splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_parse(page: Path) -> None:
    for line in command_lines(page):
        if called := re.match(r"(?:\$ |kubectl exec .* -- |\.venv/bin/)?penstock ([a-z].*)", line):
            words = shlex.split(called[1].split(" | ")[0], comments=True)
            cli.make_parser(words[0]).parse_args(words)  # exits for an unknown flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_text_exist(page: Path) -> None:
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for called in re.findall(r"`penstock\s+([a-z][^`]*)`", text):
        name, *words = called.split()
        assert find_group(name), called
        shown = subparser_help(name) if any(word.startswith("--") for word in words) else ""
        for flag in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words)):
            assert flag in shown, called
    for target in re.findall(r"`make\s+([a-z-]+)", text):
        assert target in targets, target


def subparser_help(name: str) -> str:
    (actions,) = [each for each in cli.make_parser(name)._actions if isinstance(each, argparse._SubParsersAction)]
    parsers = [actions.choices[name]]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return "\n".join(parser.format_help() for parser in parsers)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_exist(page: Path) -> None:
    for path in re.findall(r"(?<!/)(?:deploy|models|benchmarks(?!/results))/[\w./-]+\w", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_shown_configuration_of_a_gpu_host_is_current() -> None:
    file = ROOT / "deploy" / "config" / "gpu-host.toml"
    config = parse(ServeConfig, read(file), source=str(file))
    assert (config.prefill_pool.num_gpus, config.decode_pool.num_gpus) == (1, 1)
    (shown,) = re.findall(r"(?s)```toml\n(.*?)```", (DOCS / "quickstart" / "gpu-host.md").read_text())
    assert shown in file.read_text()


def test_chart_values_that_pages_set_exist() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "penstock" / "values.yaml").read_text())
    keys = re.findall(r"--set ([\w.]+)=", (DOCS / "quickstart" / "kubernetes.md").read_text())
    assert keys
    for key in keys:
        found = values
        for part in key.split("."):
            assert part in found, key
            found = found[part]


def test_the_table_of_pages_follows_from_the_layout() -> None:
    rows = re.findall(r"(?m)^\| ([\w.-]+)(?: \(.*\))? \| ([\d,]+(?: \| [\d,]+){5}) \|$", TUNING.read_text())
    assert len(rows) == 5
    for name, cells in rows:
        shape = find_shape(name)
        heads, dim = shape.num_kv_heads, shape.head_dim
        if shape.latent_rank:
            heads, dim = 1, (shape.latent_rank + shape.rope_dim) // 2
        plain = KVLayout(shape.num_layers, heads, 16, dim, "bfloat16", "revision")
        quantized = KVLayout(shape.num_layers, heads, 16, dim, "bfloat16", "revision", kv_dtype="fp8")
        assert [int(cell.replace(",", "")) for cell in cells.split(" | ")] == [
            shape.num_layers,
            heads,
            dim,
            plain.page_bytes // 16,
            quantized.page_bytes // 16,
            plain.page_bytes,
        ]
        assert plain.page_bytes == shape.num_layers * 2 * heads * 16 * dim * 2
        assert quantized.page_bytes == shape.num_layers * 2 * heads * 16 * (dim + 4)


def test_the_example_shows_the_commands_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    command, printed = re.findall(r"(?ms)^```\n(penstock plan-memory .*?)\n```\n\n```\n(.*?)```", TUNING.read_text())[0]
    assert cli.main(shlex.split(command)[1:]) == 0
    assert printed in capsys.readouterr().out


def test_the_example_of_a_large_gpu_follows_from_the_shape() -> None:
    shape = find_shape("llama-3.1-8b")
    pool = (141e9 - (600 << 20) - shape.weight_bytes) * 0.8
    tokens = pool / shape.kv_token_bytes
    assert f"{round(pool / 1e9)} GB of pages, or\n{round(tokens, -3):,.0f} tokens: {int(tokens / 32768)} requests" in (
        TUNING.read_text()
    )
    assert f'`kv_dtype = "fp8"` {int(pool / 67_584 / 32768)}.' in TUNING.read_text()
