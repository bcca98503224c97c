"""The C++ kernels' functions, typed. What calls them checks their arguments; they trust them."""

from __future__ import annotations

import ctypes
from typing import Any

from engine.kernels.cpu_build import load_library

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "penstock_paged_attention": [_POINTER] * 6 + [_LONG] * 2 + [_INT] * 7 + [_FLOAT] + [_INT] * 3,
    "penstock_write_kv": [_POINTER] * 5 + [_LONG] * 4 + [_INT] * 4,
    "penstock_write_kv_codes": [_POINTER] * 5 + [_LONG] * 4 + [_INT] * 6,
    "penstock_rms_norm": [_POINTER] * 3 + [_LONG] + [_INT] * 2 + [_LONG, _FLOAT] + [_INT] * 2,
    "penstock_add_rms_norm": [_POINTER] * 3 + [_LONG, _INT, _FLOAT] + [_INT] * 2,
    "penstock_silu_and_mul": [_POINTER] * 2 + [_LONG] + [_INT] * 3,
    "penstock_rope": [_POINTER] * 3 + [_LONG] + [_INT] * 2 + [_LONG] + [_INT] * 2,
}
# Only where the library was built for a processor with AMX.
_TILE_SIGNATURES: dict[str, list[Any]] = {
    "penstock_pack_linear": [_POINTER] * 2 + [_INT] * 3,
    "penstock_linear": [_POINTER] * 3 + [_INT, _LONG, _INT],
    "penstock_decoder": [_POINTER] + [_INT] * 2 + [_POINTER] + [_INT] * 2,
}


class NativeKernels:
    """The library's functions, typed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bind(library, _SIGNATURES)
        self.has_tiles = bool(library.penstock_has_tiles())
        if self.has_tiles:
            self._bind(library, _TILE_SIGNATURES)

    def _bind(self, library: ctypes.CDLL, signatures: dict[str, list[Any]]) -> None:
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            setattr(self, name.removeprefix("penstock_"), function)

    paged_attention: Any
    write_kv: Any
    write_kv_codes: Any
    rms_norm: Any
    add_rms_norm: Any
    silu_and_mul: Any
    rope: Any
    pack_linear: Any
    linear: Any
    decoder: Any


def load_native() -> NativeKernels | None:
    """None where this machine cannot build them; `engine.kernels.cpu_build` logs why."""
    library = load_library()
    return NativeKernels(library) if library is not None else None
