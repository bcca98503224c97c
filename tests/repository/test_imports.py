"""Tests which folders and rooms may import each other, that policies stay pure, and what the bare client needs."""

from __future__ import annotations

import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import house

ROOT = Path(__file__).resolve().parents[2]

# folder -> the other root folders that it may import
ARROWS: dict[str, set[str]] = {
    "penstock": set(),
    "engine": {"penstock"},
    "kv_transfer": {"penstock", "engine"},
    "worker": {"penstock", "engine", "kv_transfer"},
    "prefill_worker": {"penstock", "engine", "kv_transfer", "worker"},
    "decode_worker": {"penstock", "engine", "kv_transfer", "worker"},
    "router": {"penstock"},
    "simulator": {
        "penstock",
        "engine",
        "kv_transfer",
        "worker",
        "prefill_worker",
        "decode_worker",
        "router",
        "cluster",
    },
    # only its command line imports the simulator: `test_only_the_command_line_imports_the_simulator`
    "cluster": {
        "penstock",
        "engine",
        "kv_transfer",
        "worker",
        "prefill_worker",
        "decode_worker",
        "router",
        "simulator",
    },
}

# commands that run decisions in virtual time -> further folders that their modules may import
COMMANDS: dict[str, set[str]] = {"cluster/cli/commands/sizing": {"simulator"}}

# folder -> libraries that it must not import
FORBIDDEN: dict[str, set[str]] = {
    "penstock": {"torch", "ray", "numpy", "fastapi", "uvloop", "tokenizers"},
    "engine": {"ray", "grpc"},
    "kv_transfer": {"ray", "grpc"},
    "worker": {"ray"},
    "prefill_worker": {"ray"},
    "decode_worker": {"ray"},
    "router": {"torch", "ray"},
    "simulator": {"ray", "torch"},
    "cluster": set(),
}

# modules that need a library which their folder does without
EXCEPTIONS: dict[str, set[str]] = {
    "penstock/client/broadcast/group.py": {"torch"},
    "penstock/client/broadcast/trainer.py": {"torch"},
    "penstock/metrics/families.py": {"numpy"},  # clients do without this module
}


# room -> the sibling rooms that it may import; unlisted rooms follow only the folders' arrows
ROOMS: dict[str, set[str]] = {
    "router.routing": set(),
    "router.text": {"admission"},
    "router.parsers": set(),
    "router.admission": {"fleet", "metrics", "routing"},
    "router.fleet": {"routing"},
    "kv_transfer.layout": set(),
    "kv_transfer.session": {"layout"},
    "kv_transfer.transports": {"layout", "session"},
    "kv_transfer.send": {"layout", "session", "transports"},
    "kv_transfer.receive": {"layout", "session", "transports"},
    "decode_worker.schedule": set(),
    "decode_worker.prefill": {"schedule"},
    "decode_worker.migrate": {"delivery", "prefill", "schedule"},
    "engine.kernels": {"cache", "cpu", "sampling", "weights"},
    "engine.sampling": {"cpu", "kernels", "graphs", "step"},
    "engine.cache": {"kernels", "parallel"},
    "cluster.scaling": {"pools"},
    "cluster.health": {"controller", "pools"},
    "cluster.lifecycle": {"controller", "pools"},
    "penstock.kv": set(),
    "penstock.bench": {"charts", "client", "rpc"},
    "penstock.charts": set(),
    "penstock.text": {"kv"},
    "penstock.config": set(),
}

# what a pure decision must not import, since it takes data and the time, and returns data
PURE_ROOMS = ("router.routing.", "kv_transfer.session.")
IMPURE = {"asyncio", "grpc", "ray", "socket", "subprocess", "threading", "time", "os", "logging", "httpx", "fastapi"}


@functools.cache
def imported_modules(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for each in house.outline(str(path.relative_to(ROOT))).imports:
        assert each.level == 0, f"{path}: relative import; name the module in full"
        found += each.names if each.module is None else [each.module]
    return tuple(found)


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_only_what_the_plan_allows(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        allowed = {folder, *ARROWS[folder], *COMMANDS.get(str(path.parent.relative_to(ROOT)), set())}
        for module in imported_modules(path):
            top = module.split(".")[0]
            stray_folder = top in ARROWS and top not in allowed
            is_forbidden = top in FORBIDDEN[folder] - EXCEPTIONS.get(str(path.relative_to(ROOT)), set())
            if stray_folder or is_forbidden or top in {"tests", "benchmarks"}:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_every_root_folder_has_its_arrows() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "models"}
    assert packages == set(ARROWS)


def test_only_cluster_imports_ray() -> None:
    users = {
        path.relative_to(ROOT).parts[0]
        for folder in [*ARROWS, "benchmarks", "models"]
        for path in (ROOT / folder).rglob("*.py")
        if any(module.split(".")[0] == "ray" for module in imported_modules(path))
    }
    assert users <= {"cluster"}


def test_the_proto_compiler_has_a_process_of_its_own() -> None:
    """In one process with it, NIXL's library aborts while it is loaded."""
    users = [
        path.name
        for folder in [*ARROWS, "benchmarks", "tests"]
        for path in (ROOT / folder).rglob("*.py")
        if any(module.split(".")[0] == "grpc_tools" for module in imported_modules(path))
    ]
    assert users == []


def test_only_the_command_line_imports_the_simulator() -> None:
    users = {
        name
        for name, path in sources().items()
        if not name.startswith("simulator")
        for module in imported_modules(path)
        if module.split(".")[0] == "simulator"
    }
    assert all(name.startswith("cluster.cli.commands.sizing") for name in users)


@pytest.mark.processes
def test_the_simulator_runs_without_torch_and_ray() -> None:
    code = (
        "import sys, simulator.replay, simulator.check\n"
        "heavy = {'torch', 'ray', 'uvloop', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'the simulator pulls in {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_sizing_commands_run_without_torch_and_ray() -> None:
    code = (
        "import sys; from cluster.cli.catalog import GROUPS, load_command\n"
        "group = next(group for group in GROUPS if group.room == 'sizing')\n"
        "[load_command(group, name) for name in group.help_lines]\n"
        "heavy = {'torch', 'ray', 'uvloop', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'the commands pull in {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_the_client_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, penstock; penstock.Client, penstock.AsyncClient\n"
        "heavy = {'torch', 'ray', 'numpy', 'uvloop', 'tokenizers', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'the client pulls in {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def sources() -> dict[str, Path]:
    """Returns the modules of all folders with arrows, by dotted name."""
    found = {}
    for folder in ARROWS:
        for path in (ROOT / folder).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_that_the_plan_allows(room: str) -> None:
    folder, name = room.split(".")
    rooms = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")} - {"v1"}
    assert name in rooms, f"{room} is no room any more; update ROOMS"
    wrong = []
    for path in sorted((ROOT / folder / name).rglob("*.py")):
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            sibling = rest.split(".")[0]
            if top == folder and sibling in rooms - {name} - ROOMS[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_policies_are_pure() -> None:
    wrong = [
        f"{name} imports {module}"
        for name, path in sources().items()
        if name.endswith("_policy") or ".policy." in name or name.startswith(PURE_ROOMS)
        for module in imported_modules(path)
        if module.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Counts imports inside functions and for type checkers too."""
    modules = sources()
    graph = {}
    for name, path in modules.items():
        targets: set[str] = set()
        for each in house.outline(str(path.relative_to(ROOT))).imports:
            if each.module is None:
                targets.update(each.names)
            else:
                full = [f"{each.module}.{imported}" for imported in each.names]
                targets |= {module if module in modules else each.module for module in full}
        graph[name] = sorted((targets & modules.keys()) - {name})
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")
