"""Says how much device memory FlashInfer's workspaces take. Torch-free, because memory plans ask too.

An upper bound by the planner of flashinfer-python 0.7 (`include/flashinfer/attention/scheduler.cuh`), of which 0.7.4
needs less; not measured.
"""

from __future__ import annotations

WORKSPACE_BYTES = 128 << 20  # for partial results; the size that the library recommends
PLAN_BYTES = 8 << 20  # of a wrapper's plan, on the device and in pinned memory, as the library sizes it
GROUP_FOR_TENSOR_CORES = 4  # query heads per KV head from which they make decodes faster, by its documentation
_MOST_BLOCKS = 2 * 160  # that split contexts: two for each multiprocessor of the largest GPU
_MOST_PLANS = 2  # kinds of layers: most models have one, some add a window
_FLOAT32_BYTES = 4


def captured_workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, num_sequences: int) -> int:
    """Returns the size of the workspace for captured decodes of `num_sequences`.

    Captured steps always split contexts, and with tensor cores each tile of queries has partial results for all of its
    rows, however few it has.
    """
    group = num_heads // num_kv_heads
    if group < GROUP_FOR_TENSOR_CORES:
        return WORKSPACE_BYTES
    tile = 16 if group <= 16 else 64  # rows; a row is a query head of a sequence
    num_tiles = max(_MOST_BLOCKS // num_kv_heads, -(-num_sequences * group // tile) + num_sequences - 1)
    return max(num_heads * num_tiles * tile * (head_dim + 1) * _FLOAT32_BYTES, WORKSPACE_BYTES)


def captured_bytes(num_heads: int, num_kv_heads: int, head_dim: int, num_sequences: int, num_pages: int) -> int:
    """Returns what captured decodes of up to `num_sequences` with `num_pages` each take besides the workspace of other
    steps: page lists, plans, and a workspace of their own if that one is too small."""
    workspace = captured_workspace_bytes(num_heads, num_kv_heads, head_dim, num_sequences)
    own = workspace if workspace > WORKSPACE_BYTES else 0
    lists = (num_sequences * num_pages + 2 * num_sequences + 1) * 4
    return own + lists + (_MOST_PLANS + 1) * PLAN_BYTES  # a wrapper allocates its own before it shares
