"""Checks of structure and language over the tracked files: sizes, unique class names, docstrings, banned words.

`python -m tests.support.repository.house PATH...` prints what is wrong below those paths; the tests in
`tests/repository/` assert that nothing is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_ENTRIES = 15
MAX_LINES = 500
MAX_TEST_LINES = 700
MAX_FUNCTION_LINES = 60
# Functions that may be longer, each with the reason. Kernels of Triton are exempt as well: each is one program.
LONG_FUNCTIONS = {
    "engine/kernels/triton/attention/paged_prefill.py:paged_prefill": "one launch with two dozen arguments",
}
# Generated, third-party or historical files, not written in the project's words.
NOT_PROSE = (
    "CHANGELOG.md",
    "LICENSE",
    "docs/glossary.md",
    "benchmarks/results/",
    "docs/results",  # from benchmarks/results/
    "models/",
    "tests/support/repository/schemas/",
)
FRAGMENT = re.compile(r"(As|How|Its|Of|One|That|Those|What|Where|Whether|Which|Who|Whom|Whose)\b")


@functools.cache
def tracked_files() -> tuple[str, ...]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    return tuple(sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file()))


def sources(*prefixes: str) -> Iterator[str]:
    """Yields the handwritten Python files below any of `prefixes`, or all of them."""
    for name in tracked_files():
        if name.endswith(".py") and "_pb2" not in name and (not prefixes or name.startswith(prefixes)):
            yield name


@dataclass(frozen=True, slots=True)
class Definition:
    """Holds a class or function, or the module itself."""

    kind: type[ast.AST]
    name: str
    line: int
    num_lines: int
    is_top_level: bool
    is_kernel: bool  # of Triton
    docstring: str


@dataclass(frozen=True, slots=True)
class Import:
    """Holds an import statement: of modules, or of names from one module."""

    module: str | None  # None: `names` are modules
    names: tuple[str, ...]
    level: int


@dataclass(frozen=True, slots=True)
class Outline:
    """Holds the parts of a file that these checks look at; the whole tree would take a hundred times the memory."""

    definitions: tuple[Definition, ...]
    imports: tuple[Import, ...]


@functools.cache
def outline(name: str) -> Outline:
    """Returns the outline of a Python file, which is parsed once."""
    definitions: list[Definition] = []
    imports: list[Import] = []

    def visit(node: ast.AST, depth: int) -> None:
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                docstring = ast.get_docstring(node, clean=False) or ""
                own_name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
                num_lines = getattr(node, "end_lineno", line) - line + 1
                is_kernel = any("triton.jit" in ast.unparse(each) for each in getattr(node, "decorator_list", ()))
                definitions.append(Definition(type(node), own_name, line, num_lines, depth == 1, is_kernel, docstring))
            case ast.Import():
                imports.append(Import(None, tuple(alias.name for alias in node.names), 0))
            case ast.ImportFrom():
                names = tuple(alias.name for alias in node.names)
                imports.append(Import(node.module or "", names, node.level))
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, block, ()):
                visit(child, depth + 1)

    visit(ast.parse((ROOT / name).read_text(), name), 0)
    return Outline(tuple(definitions), tuple(imports))


def crowded_folders(*prefixes: str) -> list[str]:
    """Lists folders with more than MAX_ENTRIES modules and sub-packages; generated stubs and csrc are exempt."""
    entries: defaultdict[str, set[str]] = defaultdict(set)
    for name in sources(*prefixes):
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if parts[depth] != "__init__.py":
                entries["/".join(parts[:depth])].add(parts[depth])
    return [f"{folder}: {len(found)} entries" for folder, found in sorted(entries.items()) if len(found) > MAX_ENTRIES]


def long_files(*prefixes: str) -> list[str]:
    """Lists Python files with more than MAX_LINES lines, or MAX_TEST_LINES below tests/."""
    sizes = {name: (ROOT / name).read_text().count("\n") for name in sources(*prefixes)}
    return [
        f"{name}: {size} lines"
        for name, size in sizes.items()
        if size > (MAX_TEST_LINES if name.startswith("tests/") else MAX_LINES)
    ]


def long_functions(*prefixes: str) -> list[str]:
    """Lists functions outside tests/ and benchmarks/ with more than MAX_FUNCTION_LINES lines, except exempt ones."""
    return [
        f"{name}: {each.name} has {each.num_lines} lines"
        for name in sources(*prefixes)
        if not name.startswith(("tests/", "benchmarks/"))
        for each in outline(name).definitions
        if each.kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        and each.num_lines > MAX_FUNCTION_LINES
        and not each.is_kernel
        and f"{name}:{each.name}" not in LONG_FUNCTIONS
    ]


def repeated_class_names() -> list[str]:
    """Lists public top-level class names that two modules outside tests/ define."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for name in sources():
        if not name.startswith("tests/"):
            for each in outline(name).definitions:
                if each.kind is ast.ClassDef and each.is_top_level and not each.name.startswith("_"):
                    homes[each.name].append(name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def fragments(*prefixes: str) -> list[str]:
    """Lists docstrings that begin as a sentence fragment."""
    found = []
    for name in sources(*prefixes):
        for each in outline(name).definitions:
            text = each.docstring.lstrip()
            if FRAGMENT.match(text):
                found.append(f"{name}:{each.line}: {text.splitlines()[0]}")
    return found


def rooms_without_introduction(*prefixes: str) -> list[str]:
    """Lists packages outside tests/ whose `__init__.py` has no docstring."""
    return [
        name
        for name in sources(*prefixes)
        if name.endswith("/__init__.py")
        and not name.startswith("tests/")
        and not outline(name).definitions[0].docstring
        if name != "penstock/v1/__init__.py"
    ]


@functools.cache
def banned_words() -> re.Pattern[str]:
    block = re.search(r"```words\n(.*?)```", (ROOT / "docs" / "glossary.md").read_text(), re.DOTALL)
    assert block, "docs/glossary.md has no ```words block"
    words = [
        re.escape(word).replace(r"\*", r"[a-z]*").replace(r"\ ", r"[\s_-]+") for word in block[1].split("\n") if word
    ]
    # An underscore or a capital ends a word, so that identifiers count too.
    return re.compile(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)


def banned_uses(*prefixes: str) -> list[str]:
    """Lists the lines with a word that docs/glossary.md bans."""
    found = []
    for name in tracked_files():
        if name.startswith(NOT_PROSE) or "_pb2" in name or (prefixes and not name.startswith(prefixes)):
            continue
        try:
            text = (ROOT / name).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := banned_words().search(line):
                found.append(f"{name}:{number}: {match[0]!r} in {line.strip()[:100]}")
    return found


def main() -> None:
    prefixes = tuple(sys.argv[1:])
    for check in (crowded_folders, long_files, long_functions, rooms_without_introduction, fragments, banned_uses):
        for line in check(*prefixes):
            print(f"{check.__name__}: {line}")
    for line in repeated_class_names():
        if not prefixes or any(prefix in line for prefix in prefixes):
            print(f"repeated_class_names: {line}")
    starts = Counter(
        inspect.cleandoc(each.docstring).split(" ")[0]
        for name in sources(*prefixes)
        for each in outline(name).definitions
        if each.kind is not ast.Module
    )
    starts.pop("", None)
    print("first words of docstrings:", ", ".join(f"{word} {count}" for word, count in starts.most_common(25)))


if __name__ == "__main__":
    main()
