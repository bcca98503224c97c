"""Lists what each attention library supports, by its name in `engine.attention`, and chooses by the device.

Torch-free: memory plans ask on machines where the library is not installed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.cache.kv_layout import KVLayout
from penstock.errors import ConfigError

_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LibrarySupport:
    """Lists what a library needs and supports."""

    package: str  # what provides it
    capability: tuple[int, int]  # the least compute capability
    head_dims: tuple[int, ...]  # for which it has kernels
    page_divides: int | None = None  # tokens that a page must divide
    takes_decodes: bool = False
    has_softcap: bool = False


LIBRARIES = {
    "flashinfer": LibrarySupport("flashinfer-python", (8, 0), (64, 128, 256), takes_decodes=True, has_softcap=True),
    "varlen": LibrarySupport("flash-attn-3 (flash_attn_interface)", (9, 0), (64, 96, 128, 192, 256)),
    "cudnn": LibrarySupport("a torch built with cuDNN 9", (9, 0), (64, 96, 128), page_divides=256),
}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The implementations of attention by name: `triton`, or a library."""

    decodes: str
    chunks: str


def choose_attention(setting: str, capability: tuple[int, int], installed: Collection[str]) -> AttentionChoice:
    """Returns what computes attention on a GPU of this compute capability, `installed` being the libraries found there.

    `auto` is Triton: no library has been measured against it yet. Raises ConfigError if the device or the installation
    lacks what a named library needs; `check_library` checks the model.
    """
    if setting in ("auto", "triton"):
        return AttentionChoice("triton", "triton")
    library = LIBRARIES[setting]
    if capability < library.capability:
        raise ConfigError(
            f"engine.attention = {setting!r} needs a GPU of compute capability {_version(library.capability)}, and "
            f"this one has {_version(capability)}; choose engine.attention = 'triton'"
        )
    if setting not in installed:
        raise ConfigError(
            f"engine.attention = {setting!r} is not installed; install {library.package}, or choose engine.attention = "
            "'triton'"
        )
    return AttentionChoice(setting if library.takes_decodes else "triton", setting)


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def captures_decodes(setting: str) -> bool:
    """Returns whether decode steps can be captured in CUDA graphs on a GPU with this `engine.attention`."""
    return setting in ("auto", "triton", *LIBRARIES)


def check_library(
    name: str, layout: KVLayout, *, has_latents: bool, has_softcap: bool, has_sinks: bool, has_chunks: bool = False
) -> None:
    """Raises ConfigError if `name` is a library that does not support the model's pages. Accepts all other backends."""
    if name not in LIBRARIES:
        return
    library = LIBRARIES[name]
    problem, fix = "", "choose engine.attention = 'triton'"
    if has_latents:
        problem = "does not support latent attention"
    elif has_sinks:
        problem = "has no attention sinks"
    elif has_chunks:
        problem = "does not support attention in chunks"
    elif has_softcap and not library.has_softcap:
        problem = "has no soft cap of attention scores"
    elif layout.is_quantized:
        problem = f"supports no scale per token, and engine.kv_dtype = {layout.kv_dtype!r} has them"
        fix = f"leave it at 'auto', or {fix}"
    elif layout.dtype not in _DTYPES:
        problem = f"computes in {' or '.join(_DTYPES)}, and engine.dtype is {layout.dtype!r}"
        fix = f"give one of those, or {fix}"
    elif layout.head_dim not in library.head_dims:
        sizes = ", ".join(map(str, library.head_dims))
        problem = f"has kernels for heads of {sizes} values, and the model's have {layout.head_dim}"
    elif library.page_divides is not None and library.page_divides % layout.page_size:
        problem = f"reads {library.page_divides} tokens at a time, and engine.page_size = {layout.page_size}"
        fix = f"give a page size that divides them, or {fix}"
    if problem:
        raise ConfigError(f"engine.attention = {name!r} {problem}; {fix}")
