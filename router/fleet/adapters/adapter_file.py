"""Reads `adapters_file` whenever it changes, and changes it for callers that load and unload adapters.

Routers share the file. A change takes a lock beside it, reads it again and replaces it in one step, so that no router
reads half a file and no change of another router is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from penstock.config import load
from penstock.config.router import AdaptersFile
from penstock.errors import CheckpointError, ConfigError, InvalidInput, ModelNotFound, Unavailable
from penstock.kv.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, adapter_revision, check_adapter_name
from penstock.rpc.reload import FileMark, FileWatcher, mark_files

log = logging.getLogger(__name__)

MAX_ADAPTERS = 1024  # that calls may add
LOCK_TIMEOUT_S = 20.0  # for another router's change
_LOCK_POLL_S = 0.02
_MAX_PATH = 4096  # characters


class AdapterFile:
    """The adapters of `adapters_file`, and their changes. `load` and `unload` block; any thread may call them."""

    def __init__(self, path: str, model: str, watcher: FileWatcher) -> None:
        """Reads the file now, and again when it changes. Raises ConfigError."""
        self._path, self._model = Path(path), model
        self._revisions = _Revisions()
        self._files = watcher.watch("adapters_file", (path,), self._read)

    @property
    def adapters(self) -> Mapping[str, AdapterRef]:
        return self._files.value

    def load(self, name: str, folder: str, *, replaces: bool) -> None:
        """Adds an adapter to the file; with `replaces` it may have the name of another, whose place it takes.

        Raises InvalidInput, or Unavailable if the file cannot be changed.
        """
        self._check(name, folder)
        with self._changing() as folders:
            if name in folders and not replaces:
                raise InvalidInput(
                    "lora_name",
                    f"= {name!r} is loaded from {folders[name]}; choose another name, unload it first, or send "
                    "load_inplace = true to replace it",
                )
            if name not in folders and len(folders) >= MAX_ADAPTERS:
                raise InvalidInput(
                    "lora_name", f"= {name!r}: {self._path} has {len(folders)} adapters, the most; unload another first"
                )
            folders[name] = folder
        log.info("adapter %r was added to %s, from %s", name, self._path, folder)

    def unload(self, name: str) -> None:
        """Removes an adapter from the file. Raises ModelNotFound, or Unavailable if the file cannot be changed."""
        with self._changing() as folders:
            if name not in folders:
                raise ModelNotFound(f"lora_name = {name[:128]!r}: no adapter has this name; GET /v1/models lists them")
            del folders[name]
        log.info("adapter %r was removed from %s", name, self._path)

    def _read(self) -> Mapping[str, AdapterRef]:
        try:
            folders = load(AdaptersFile, self._path).adapters
            paths = {name: str(self._path.parent / folder) for name, folder in folders.items()}
            check_names(paths, self._model)
            return self._revisions.read_all(paths)
        except (ConfigError, CheckpointError) as error:
            raise ConfigError(f"adapters_file = {self._path}: {error.message}") from None

    def _check(self, name: str, folder: str) -> None:
        try:
            check_adapter_name(name, self._model)
        except InvalidInput as error:
            raise InvalidInput("lora_name", error.problem) from None
        if not Path(folder).is_absolute() or len(folder) > _MAX_PATH or not folder.isprintable():
            raise InvalidInput(
                "lora_path",
                f"= {folder[:100]!r}; give the absolute path of the adapter's folder, the same for routers and workers",
            )
        try:
            self._revisions.read(name, folder)
        except CheckpointError as error:
            raise InvalidInput("lora_path", f"= {error.message}") from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, str]]:
        """Yields the folders by name, and writes them at the end if the block raises nothing.

        Waits while another router changes the file. Raises Unavailable if that takes too long, or if the file is
        unusable or cannot be written.
        """
        try:
            with _locked(self._path):
                self._refresh()
                folders = dict(load(AdaptersFile, self._path).adapters)
                yield folders
                _replace(self._path, _text(self._path, folders))
                self._refresh()
        except (OSError, ConfigError) as error:
            problem = error.message if isinstance(error, ConfigError) else error.strerror
            raise Unavailable(
                f"adapters_file = {self._path}: {problem}; mend the file, and let routers write to its folder"
            ) from error

    def _refresh(self) -> None:
        """Reads the file if it has changed. Raises ConfigError if it is unusable."""
        self._files.refresh()
        if self._files.problem:
            raise ConfigError(self._files.problem)


class _Revisions:
    """Reads adapters, and reads the files of none again that have not changed since."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[FileMark, str]] = {}  # by folder

    def read_all(self, folders: Mapping[str, str]) -> Mapping[str, AdapterRef]:
        """Reads adapters by name, and forgets all others. Blocks; raises CheckpointError for a missing file."""
        found = {name: self.read(name, folder) for name, folder in folders.items()}
        self._known = {folder: self._known[folder] for folder in folders.values()}
        return found

    def read(self, name: str, folder: str) -> AdapterRef:
        """Blocks; raises CheckpointError for a missing file."""
        mark = mark_files([f"{folder}/{file}" for file in (CONFIG_FILE, WEIGHTS_FILE)])
        known = self._known.get(folder)
        if known is None or known[0] != mark:
            known = self._known[folder] = (mark, adapter_revision(Path(folder)))
        return AdapterRef(name, known[1], folder)


def check_names(names: Iterable[str], model: str) -> None:
    """Raises ConfigError if an adapter may not have its name."""
    for name in names:
        try:
            check_adapter_name(name, model)
        except InvalidInput as error:
            raise ConfigError(f"adapters: {error.message}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the file's changes, which the kernel frees if this process dies. Blocks.

    Raises OSError, or Unavailable if another router holds it for too long: one that is frozen must not hold a thread of
    this one for each call.
    """
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    with open(f"{path}.lock", "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up_s:
                    raise Unavailable(
                        f"another router has held {path}.lock for {LOCK_TIMEOUT_S:g} s; find out which one hangs, and "
                        "try again"
                    ) from None
            time.sleep(_LOCK_POLL_S)
        yield


def _text(path: Path, folders: Mapping[str, str]) -> str:
    if path.suffix == ".json":
        return json.dumps({"adapters": folders}, indent=2) + "\n"
    lines = [f"{_quoted(name)} = {_quoted(folder)}\n" for name, folder in folders.items()]
    return "".join(["[adapters]\n", *lines])


def _quoted(text: str) -> str:
    """Returns a string of TOML: JSON's, in which one more control character is escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    """Replaces the file, or the one that it links to, in one step, with the same permissions. Raises OSError."""
    real = path.resolve()
    beside = real.with_name(f".{real.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), stat.S_IMODE(real.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, real)
    finally:
        beside.unlink(missing_ok=True)
