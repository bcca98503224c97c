"""Tests `penstock completion` in the installed shells, and the output of mistyped flags and `--version`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from cluster.cli.catalog import GROUPS
from cluster.cli.main import main

NAMES = [name for group in GROUPS for name in group.help_lines]


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(script: str, *words: str) -> list[str]:
    """Returns what bash offers as completions of the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _penstock; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    shell = shutil.which("bash")
    assert shell is not None
    done = subprocess.run([shell, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    made = script(capsys, "bash")
    assert complete(made, "penstock", "") == [*NAMES, "--help", "--version"]
    assert complete(made, "penstock", "pl") == ["plan", "plan-memory"]
    assert "--admin" in complete(made, "penstock", "status", "--")
    assert complete(made, "penstock", "completion", "") == ["bash", "zsh", "fish", "--help"]
    assert {"run", "compare", "report"} <= set(complete(made, "penstock", "bench", ""))
    assert complete(made, "penstock", "serve", "README") == []  # an empty list, for which bash offers files


def test_the_other_shells_get_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert script(capsys, "zsh").startswith("autoload -U +X bashcompinit")
    fish = script(capsys, "fish").splitlines()
    assert all(line.startswith("complete -c penstock -n ") for line in fish)
    assert [line.split(" -a ")[1].split()[0] for line in fish if "__fish_use_subcommand -a" in line] == NAMES
    assert "complete -c penstock -n '__fish_seen_subcommand_from status' -l admin" in fish


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_an_installed_shell_runs_its_script_without_errors(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    begin = "autoload -U compinit && compinit -u\n" if shell == "zsh" else ""
    done = subprocess.run(
        [path, "-c", begin + script(capsys, shell)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "usage", "advice"),
    [
        (["status", "--jsno"], "penstock status", "did you mean --json?"),
        (["drain", "decode-0", "--replaec"], "penstock drain", "did you mean --replace?"),
        (["bench", "compare", "a", "b", "--jsn"], "penstock bench compare", "unrecognized arguments: --jsn"),
        (["status", "surplus"], "penstock status", "unrecognized arguments: surplus\n"),
        (["--jsno"], "penstock COMMAND", ""),
    ],
)
def test_a_mistyped_flag_shows_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], words: list[str], usage: str, advice: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"usage: {usage}")
    assert advice in message


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"penstock {metadata.version('penstock')}\n"


def test_a_command_with_missing_packages_is_completed_without_its_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    for name in [name for name in sys.modules if name.startswith(("simulator", "cluster.cli.commands.sizing"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert '    plan) words="" ;;' in script
    assert "--json" in next(line for line in script.splitlines() if line.strip().startswith("status)"))
