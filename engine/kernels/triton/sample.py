"""Samples a token from each row of logits on the device, the same as `engine.sampling.sampler` on the host (Triton).

Nothing is sorted. The floor of top-k is the largest weight that at least k weights reach; that of top-p is the largest
weight such that the weights that reach it hold the wanted mass. Weights are in [0, 1], where a float's bits grow with
its value, so the bits of a floor are found five at a time, with 31 candidates in one pass over the row. Many programs
work on a row without atomics, with sums in fp64, so a sample is reproducible. The host never waits.

Rows of temperature 0 take the likeliest token, the first among equals; if all rows do, nothing else is computed.
Reference: `engine.sampling.sampler` on a CPU. Exponentials may round differently on each device; if that moves a
uniform across the border of two tokens, once in some millions of samples, another token is sampled.

Shapes: `B` rows, `V` vocabulary, `X` chunks of it, `D` candidate digits, `Y` blocks of a chunk, `Z` tokens of a block.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index
from engine.kernels.triton.common import cdiv, next_power_of_2
from engine.sampling.row_params import SamplingTensors

_CHUNK = 4096
_BLOCK = 128  # as `engine.sampling.distribution` sums them
_DIGIT_BITS, _NUM_DIGITS = 5, 6  # the 30 bits of a float up to 1
_NUM_WARPS = 8


def sample_tokens(
    logits_BV: torch.Tensor, params: SamplingTensors, *, chunk: int = _CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens, int64 [B], and the sums of the weights that they were sampled from, float64 [B].

    If a sum is not finite and above 0, the row holds no distribution (a greedy row then has no likeliest token, or
    holds a NaN). Its token is meaningless, but is in the vocabulary, so that it can be embedded. `logits_BV` is fp32,
    bf16 or fp16 with last stride 1. Never waits for the device; a CUDA graph can capture the call.
    """
    num_rows, vocab_size = logits_BV.shape
    _check(logits_BV, params)
    num_chunks = cdiv(vocab_size, chunk)
    new = logits_BV.new_empty
    tokens_B, totals_B = new(num_rows, dtype=torch.int64), new(num_rows, dtype=torch.float64)
    if num_rows == 0:
        return tokens_B, totals_B
    peak_BX = new((num_rows, num_chunks), dtype=torch.float32)
    peak_at_BX = new((num_rows, num_chunks), dtype=torch.int32)
    grid = (num_rows, num_chunks)
    sizes = {"NUM_CHUNKS": num_chunks, "CHUNKS_PADDED": next_power_of_2(num_chunks)}
    _scan_kernel[grid](
        logits_BV, peak_BX, peak_at_BX, logits_BV.stride(0), vocab_size, CHUNK=chunk, **sizes, num_warps=_NUM_WARPS
    )
    if not params.any_random:
        _likeliest_kernel[(num_rows,)](peak_BX, peak_at_BX, tokens_B, totals_B, vocab_size, **sizes, num_warps=1)
        return tokens_B, totals_B
    weight_BV = new((num_rows, num_chunks * chunk), dtype=torch.float32)
    _weigh_kernel[grid](
        logits_BV, peak_BX, params.temperature_B, weight_BV, logits_BV.stride(0), vocab_size,
        CHUNK=chunk, **sizes, num_warps=_NUM_WARPS,
    )  # fmt: skip
    floor_B = params.min_p_B.clone()
    for wanted, by_mass in ((params.any_top_k, False), (params.any_top_p, True)):
        if wanted:
            _raise_floor(weight_BV, params, floor_B, num_chunks, chunk, by_mass)
    mass_BX = new((num_rows, num_chunks), dtype=torch.float64)
    _mass_kernel[grid](
        weight_BV, params.temperature_B, floor_B, mass_BX, CHUNK=chunk, BLOCK=_BLOCK, **sizes, num_warps=_NUM_WARPS
    )
    _pick_kernel[(num_rows,)](
        weight_BV, mass_BX, floor_B, peak_BX, peak_at_BX, params.temperature_B, params.seed_B, params.position_B,
        tokens_B, totals_B, vocab_size, CHUNK=chunk, BLOCK=_BLOCK, **sizes, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return tokens_B, totals_B


def _raise_floor(
    weight_BV: torch.Tensor, params: SamplingTensors, floor_B: torch.Tensor, num_chunks: int, chunk: int, by_mass: bool
) -> None:
    """Raises the floor of rows with top-k, or with top-p (`by_mass`), which counts the weights above the old floor."""
    num_rows = weight_BV.shape[0]
    reach_JBXD = weight_BV.new_empty((_NUM_DIGITS, num_rows, num_chunks, 1 << _DIGIT_BITS), dtype=torch.float64)
    found_JB = weight_BV.new_zeros((_NUM_DIGITS + 1, num_rows), dtype=torch.int32)
    goal_B = params.top_p_B if by_mass else params.top_k_B
    for digit in range(_NUM_DIGITS + 1):
        _narrow_kernel[(num_rows, num_chunks if digit < _NUM_DIGITS else 1)](
            weight_BV, params.temperature_B, goal_B, floor_B, reach_JBXD, found_JB, num_rows, digit,
            IS_FIRST=digit == 0, IS_LAST=digit == _NUM_DIGITS, NUM_DIGITS=_NUM_DIGITS, DIGIT_BITS=_DIGIT_BITS,
            BY_MASS=by_mass, CHUNK=chunk, BLOCK=_BLOCK,
            NUM_CHUNKS=num_chunks, CHUNKS_PADDED=next_power_of_2(num_chunks), num_warps=_NUM_WARPS,
        )  # fmt: skip


def _check(logits_BV: torch.Tensor, params: SamplingTensors) -> None:
    if logits_BV.dim() != 2 or logits_BV.shape[1] == 0 or logits_BV.stride(1) != 1:
        raise ValueError(
            f"sample_tokens: logits_BV has shape {tuple(logits_BV.shape)}, strides {logits_BV.stride()}; expected "
            "[B, V] with the last dense"
        )
    for name, dtype in (
        ("temperature_B", torch.float32),
        ("top_k_B", torch.int32),
        ("top_p_B", torch.float64),
        ("min_p_B", torch.float32),
        ("seed_B", torch.int64),
        ("position_B", torch.int64),
    ):
        check_index("sample_tokens", name, getattr(params, name), dtype, (logits_BV.shape[0],))


@triton.jit
def _scan_kernel(
    logits_ptr,  # [B, V], last stride 1
    peak_ptr,  # fp32 [B, X], largest logit of a chunk; infinity if it holds a NaN
    peak_at_ptr,  # int32 [B, X], the first token that has it
    logits_stride_b,
    vocab_size,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):  # grid: (B, X)
    row = tl.program_id(0).to(tl.int64)
    token_V = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit_V = tl.load(logits_ptr + row * logits_stride_b + token_V, mask=token_V < vocab_size, other=float("-inf"))
    logit_V = logit_V.to(tl.float32)
    is_nan_V = (logit_V != logit_V).to(tl.int32)
    logit_V = tl.where(is_nan_V > 0, float("inf"), logit_V)  # what a maximum makes of a NaN differs by device
    peak, place = tl.max(logit_V, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(peak_ptr + row * NUM_CHUNKS + tl.program_id(1), peak)
    tl.store(peak_at_ptr + row * NUM_CHUNKS + tl.program_id(1), tl.program_id(1) * CHUNK + place)


@triton.jit
def _likeliest(peak_ptr, peak_at_ptr, row, vocab_size, NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    """Returns the row's likeliest token, within the vocabulary, and 1.0 if its logit is finite, else 0.0."""
    chunk_X = tl.arange(0, CHUNKS_PADDED)
    peak_X = tl.load(peak_ptr + row * NUM_CHUNKS + chunk_X, mask=chunk_X < NUM_CHUNKS, other=float("-inf"))
    peak, chunk = tl.max(peak_X, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(peak_at_ptr + row * NUM_CHUNKS + tl.minimum(chunk, NUM_CHUNKS - 1)).to(tl.int64)
    is_finite = (peak > float("-inf")) & (peak < float("inf"))
    return tl.minimum(token, vocab_size - 1), is_finite.to(tl.float64)


@triton.jit
def _likeliest_kernel(
    peak_ptr, peak_at_ptr, tokens_ptr, totals_ptr, vocab_size, NUM_CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr
):  # grid: (B,)
    row = tl.program_id(0).to(tl.int64)
    token, total = _likeliest(peak_ptr, peak_at_ptr, row, vocab_size, NUM_CHUNKS, CHUNKS_PADDED)
    tl.store(tokens_ptr + row, token)
    tl.store(totals_ptr + row, total)


@triton.jit
def _weigh_kernel(
    logits_ptr,  # [B, V], last stride 1
    peak_ptr,  # fp32 [B, X]
    temperature_ptr,  # fp32 [B]
    weight_ptr,  # fp32 [B, X * CHUNK]: probabilities up to one factor a row, the likeliest token's is 1
    logits_stride_b,
    vocab_size,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):  # grid: (B, X)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return
    chunk_X = tl.arange(0, CHUNKS_PADDED)
    peak = tl.max(tl.load(peak_ptr + row * NUM_CHUNKS + chunk_X, mask=chunk_X < NUM_CHUNKS, other=float("-inf")), 0)
    token_V = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logit_V = tl.load(logits_ptr + row * logits_stride_b + token_V, mask=token_V < vocab_size, other=float("-inf"))
    weight_V = tl.exp(tl.div_rn(logit_V.to(tl.float32) - peak, tl.full([CHUNK], 0.0, tl.float32) + temperature))
    tl.store(weight_ptr + row * (NUM_CHUNKS * CHUNK) + token_V, weight_V)


@triton.jit(do_not_specialize=["digit", "num_rows"])
def _narrow_kernel(
    weight_ptr,  # fp32 [B, X * CHUNK]
    temperature_ptr,  # fp32 [B]
    goal_ptr,  # int32 or fp64 [B]: top-k or top-p
    floor_ptr,  # fp32 [B]; the last digit's launch raises it
    reach_ptr,  # fp64 [digits, B, X, D]: how many weights of a chunk reach a candidate, or their sum
    found_ptr,  # int32 [digits + 1, B]: bits of the floor that are known before each digit
    num_rows,
    digit,  # the digit that is tried
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,  # after the last digit: none is left to try
    NUM_DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BY_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):  # grid: (B, X); (B, 1) after the last digit
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    goal = tl.load(goal_ptr + row)
    asks = goal < 1.0 if BY_MASS else goal > 0
    if (tl.load(temperature_ptr + row) == 0.0) | (asks == 0):
        return
    NUM_CANDIDATES: tl.constexpr = 1 << DIGIT_BITS
    chunk_X = tl.arange(0, CHUNKS_PADDED)
    candidate_D = tl.arange(0, NUM_CANDIDATES)
    place_XD = chunk_X[:, None] * NUM_CANDIDATES + candidate_D[None, :]
    known = tl.full([], 0, tl.int32)
    if not IS_FIRST:  # every program evaluates the previous pass for itself
        goal = goal.to(tl.float64)
        if BY_MASS:  # a share of all mass above the floor, which the first pass has summed too
            all_X = tl.load(
                reach_ptr + row * NUM_CHUNKS * NUM_CANDIDATES + chunk_X * NUM_CANDIDATES,
                mask=chunk_X < NUM_CHUNKS, other=0.0,
            )  # fmt: skip
            goal *= tl.sum(all_X, 0)
        last = reach_ptr + ((digit - 1) * num_rows + row) * NUM_CHUNKS * NUM_CANDIDATES
        reach_D = tl.sum(tl.load(last + place_XD, mask=(chunk_X < NUM_CHUNKS)[:, None], other=0.0), 0)
        best = tl.sum(((reach_D >= goal) & (candidate_D > 0)).to(tl.int32), 0)
        known = tl.load(found_ptr + (digit - 1) * num_rows + row) + (best << ((NUM_DIGITS - digit) * DIGIT_BITS))
        if chunk == 0:
            tl.store(found_ptr + digit * num_rows + row, known)
    floor = tl.load(floor_ptr + row)
    if IS_LAST:
        tl.store(floor_ptr + row, tl.maximum(floor, known.to(tl.float32, bitcast=True)))
    else:
        least_D = known + (candidate_D << ((NUM_DIGITS - 1 - digit) * DIGIT_BITS))
        weights = weight_ptr + row * (NUM_CHUNKS * CHUNK) + chunk * CHUNK
        reach_DZ = tl.zeros([NUM_CANDIDATES, BLOCK], tl.float64)
        for start in range(0, CHUNK, BLOCK):
            weight_Z = tl.load(weights + start + tl.arange(0, BLOCK))
            bits_Z = weight_Z.to(tl.int32, bitcast=True)
            counted_Z = tl.full([BLOCK], 1.0, tl.float64)
            if BY_MASS:
                counted_Z = weight_Z.to(tl.float64)
                bits_Z = tl.where(weight_Z >= floor, bits_Z, -1)
            reach_DZ += tl.where(bits_Z[None, :] >= least_D[:, None], counted_Z[None, :], 0.0)
        mine = reach_ptr + ((digit * num_rows + row) * NUM_CHUNKS + chunk) * NUM_CANDIDATES
        tl.store(mine + candidate_D, tl.sum(reach_DZ, 1))


@triton.jit
def _mass_kernel(
    weight_ptr,  # fp32 [B, X * CHUNK]
    temperature_ptr,  # fp32 [B]
    floor_ptr,  # fp32 [B]
    mass_ptr,  # fp64 [B, X], mass of a chunk above the floor
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):  # grid: (B, X)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row) == 0.0:
        return
    mass_Y = tl.sum(_kept(weight_ptr, floor_ptr, row, tl.program_id(1), CHUNK, BLOCK, NUM_CHUNKS), 1).to(tl.float64)
    tl.store(mass_ptr + row * NUM_CHUNKS + tl.program_id(1), tl.sum(mass_Y, 0))


@triton.jit
def _kept(
    weight_ptr, floor_ptr, row, chunk, CHUNK: tl.constexpr, BLOCK: tl.constexpr, NUM_CHUNKS: tl.constexpr
):  # returns [Y, Z]; NaN stays NaN
    place_YZ = tl.arange(0, CHUNK // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    weight_YZ = tl.load(weight_ptr + row * (NUM_CHUNKS * CHUNK) + chunk * CHUNK + place_YZ)
    return weight_YZ * (weight_YZ >= tl.load(floor_ptr + row)).to(tl.float32)


@triton.jit
def _pick_kernel(
    weight_ptr,  # fp32 [B, X * CHUNK]
    mass_ptr,  # fp64 [B, X]
    floor_ptr,  # fp32 [B]
    peak_ptr,  # fp32 [B, X]
    peak_at_ptr,  # int32 [B, X]
    temperature_ptr,  # fp32 [B]
    seed_ptr,  # int64 [B]
    position_ptr,  # int64 [B]
    tokens_ptr,  # int64 [B]
    totals_ptr,  # fp64 [B]
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):  # grid: (B,)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row) == 0.0:
        likeliest, is_finite = _likeliest(peak_ptr, peak_at_ptr, row, vocab_size, NUM_CHUNKS, CHUNKS_PADDED)
        tl.store(tokens_ptr + row, likeliest)
        tl.store(totals_ptr + row, is_finite)
        return
    chunk_X = tl.arange(0, CHUNKS_PADDED)
    mass_X = tl.load(mass_ptr + row * NUM_CHUNKS + chunk_X, mask=chunk_X < NUM_CHUNKS, other=0.0)
    total = tl.sum(mass_X, 0)
    tl.store(totals_ptr + row, total)
    target = total * _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    chunk, target = _descend(mass_X, target, CHUNKS_PADDED)
    chunk = tl.minimum(chunk, NUM_CHUNKS - 1)  # the chunk is out of range if sums are NaN
    kept_YZ = _kept(weight_ptr, floor_ptr, row, chunk, CHUNK, BLOCK, NUM_CHUNKS)
    block_Y = tl.arange(0, CHUNK // BLOCK)
    block, target = _descend(tl.sum(kept_YZ, 1).to(tl.float64), target, CHUNK // BLOCK)
    inside_Z = tl.sum(tl.where((block_Y == block)[:, None], kept_YZ, 0.0), 0)
    place, _ = _descend(inside_Z.to(tl.float64), target, BLOCK)
    tl.store(tokens_ptr + row, tl.minimum(chunk.to(tl.int64) * CHUNK + block * BLOCK + place, vocab_size - 1))


@triton.jit
def _descend(mass_X, target, SIZE: tl.constexpr):
    """Returns the first place whose running sum exceeds the target, and the target minus the sum before that place.

    A target that rounding has raised to the last sum counts as just below it."""
    place_X = tl.arange(0, SIZE)
    sums_X = tl.cumsum(mass_X, 0)
    total = tl.max(sums_X, 0)
    below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    target = tl.minimum(target, below)
    place = tl.minimum(tl.sum((sums_X <= target).to(tl.int32), 0), SIZE - 1)
    before = tl.sum(tl.where(place_X == place - 1, sums_X, 0.0), 0)
    return place, target - before


@triton.jit
def _uniform(seed, position):
    """Computes `engine.sampling.counter_random.uniform`."""
    state = _mix(seed.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15 * (position + 1).to(tl.uint64, bitcast=True)
    return (_mix(state) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)
