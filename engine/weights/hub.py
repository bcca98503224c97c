"""Fetches checkpoints of the Hugging Face Hub into its cache, by their ids: `org/name`, or `org/name@revision`.

The library `huggingface_hub` does the work and shows its progress; this module names the wanted files and says what to
do if it fails. HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE apply as usual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.weights.checkpoint import CONFIG_FILE
from penstock.errors import CheckpointError, PenstockError, Unavailable

_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
# Files in subfolders and under these names hold the same weights for other programs.
_UNWANTED = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub. Without a revision, it is the default branch."""

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """Returns the model with the id `text`; None for a path that exists, or for text that is not an id."""
        found = _ID.fullmatch(text)
        if found is None or Path(text).exists():
            return None
        return cls(found["repo"], found["revision"])

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    def fetch(self, *, config_only: bool = False) -> Path:
        """Downloads what is not in the cache yet, and returns the folder. Blocks for as long as that takes.

        With `config_only`, it downloads only config.json; the folder may already hold other files. Raises
        CheckpointError, or Unavailable if the Hub cannot be reached; both say what to do.
        """
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise CheckpointError(
                f"{self} is not a folder; to download it from the Hugging Face Hub, run `pip install "
                "huggingface_hub`, or give a folder that has it"
            ) from error
        wanted = [CONFIG_FILE] if config_only else list(_WANTED)
        try:
            folder = snapshot_download(
                self.repo, revision=self.revision, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
            )
        except Exception as error:  # of the library, or of whichever HTTP client it uses
            raise self._explain(error) from error
        return Path(folder)

    def _explain(self, error: Exception) -> PenstockError:
        """Returns the library's error in terms of what the operator can do."""
        from huggingface_hub import constants, errors

        place, cause = constants.ENDPOINT, error.__cause__ or error
        causes = (error, cause)
        if _holds(causes, errors.GatedRepoError):
            return CheckpointError(
                f"{self.repo} is gated: accept its terms at {place}/{self.repo}, then give a token of that account in "
                "HF_TOKEN or by `hf auth login`"
            )
        if _holds(causes, errors.RepositoryNotFoundError):
            return CheckpointError(
                f"{self.repo} is not a folder, and {place} has no such model, or hides it: check the name; a private "
                "model needs a token in HF_TOKEN or by `hf auth login`"
            )
        if _holds(causes, errors.RevisionNotFoundError):
            return CheckpointError(f"{self.repo} has no revision {self.revision}; give a branch, a tag or a commit")
        if _holds(causes, errors.OfflineModeIsEnabled):
            return CheckpointError(
                f"{self} is incomplete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids downloading "
                "it; unset that, or copy the cache of a machine that has it"
            )
        said = str(cause).partition("\n")[0]
        return Unavailable(
            f"{self} cannot be downloaded from {place} ({type(cause).__name__}: {said}), and the cache "
            f"{constants.HF_HUB_CACHE} has not all of it; check the network, HF_ENDPOINT and the disk, or give a folder"
        )


def _holds(causes: tuple[BaseException, ...], kind: type[BaseException]) -> bool:
    return any(isinstance(cause, kind) for cause in causes)
