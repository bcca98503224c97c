"""Chooses each token's experts and sorts the (token, expert) pairs by expert (Triton): one launch for a tile of tokens,
two for more.

The first launch chooses, weighs and counts how often each tile of tokens took an expert. A token takes an expert once,
so a pair's place is the start of its expert, the count in the tiles before its own, and the count among the tokens
before it in its tile. With a single tile the first launch knows all three. Reference: `engine.kernels.expert_routing`.

Of equal scores the first expert is chosen. A row with NaN takes some existing experts, each once, with weights of NaN.

Shapes: `T` tokens, `E` experts, `C` experts of a token, `G` groups, `B` tiles of tokens; `L` lanes: the experts in
their order, each group padded to a power of two.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.expert_routing import Routing, RoutingRule
from engine.kernels.triton.common import cdiv, next_power_of_2

_VALUES = 4096  # of a tile, 16 for each thread
_FEW_TOKENS = 4
_TILES_ALONE = 32  # with more tiles of tokens a program of the second launch places several, which share its counting
_TILES_TOGETHER = 8
MAX_EXPERTS = 1024


def route_experts(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None) -> Routing:
    """See `LayerOps.route_experts`; `logits_TE` has last stride 1, `bias_E` is float32."""
    if logits_TE.dim() != 2 or logits_TE.stride(1) != 1 or not 1 <= logits_TE.shape[1] <= MAX_EXPERTS:
        raise ValueError(
            f"route_experts: logits_TE has shape {tuple(logits_TE.shape)}, strides {logits_TE.stride()}; expected "
            f"[T, E] with at most {MAX_EXPERTS} experts, the last dense"
        )
    (num_tokens, num_experts), num_chosen = logits_TE.shape, rule.num_chosen
    if bias_E is not None and (bias_E.dtype, bias_E.shape) != (torch.float32, (num_experts,)):
        raise ValueError(
            f"route_experts: bias_E is {bias_E.dtype} {tuple(bias_E.shape)}; expected torch.float32 [{num_experts}]"
        )
    own = rule.own_experts or range(num_experts)
    new, shape = logits_TE.new_empty, (num_tokens, num_chosen)
    routing = Routing(
        new(shape, dtype=torch.int64),
        new(shape, dtype=torch.float32),
        new(shape, dtype=torch.int64),
        new(num_tokens * num_chosen, dtype=torch.int64),
        new(len(own) + 1, dtype=torch.int32),
        rule.own_experts is not None,
    )
    if num_tokens == 0:
        routing.start_E1.zero_()
        return routing
    is_grouped = rule.num_chosen_groups < rule.num_groups
    num_groups = rule.num_groups if is_grouped else 1
    group_size = num_experts // num_groups
    lanes = next_power_of_2(num_groups) * next_power_of_2(group_size)
    tile = _FEW_TOKENS if num_tokens <= _FEW_TOKENS else max(1, _VALUES // lanes)
    num_tiles, num_warps = cdiv(num_tokens, tile), 8 if tile > _FEW_TOKENS else 4
    count_BE = new((num_tiles, num_experts), dtype=torch.int32)
    sizes = {"NUM_EXPERTS": num_experts, "NUM_CHOSEN": num_chosen, "TILE": tile}
    sizes |= {"FIRST_OWN": own.start, "NUM_OWN": len(own)}
    _route_kernel[(num_tiles,)](
        logits_TE, logits_TE if bias_E is None else bias_E, routing.chosen_TC, routing.weight_TC, routing.place_TC,
        routing.row_X, routing.start_E1, count_BE, num_tokens, rule.scaling, logits_TE.stride(0), **sizes,
        CHOSEN_PADDED=next_power_of_2(num_chosen), NUM_GROUPS=num_groups,
        GROUPS_PADDED=next_power_of_2(num_groups), GROUP_SIZE=group_size, SIZE_PADDED=next_power_of_2(group_size),
        NUM_CHOSEN_GROUPS=rule.num_chosen_groups if is_grouped else 0, SCORING=rule.scoring, NORMALIZE=rule.normalize,
        HAS_BIAS=bias_E is not None, IS_ALONE=num_tiles == 1, num_warps=num_warps,
    )  # fmt: skip
    if num_tiles > 1:
        together = 1 if num_tiles <= _TILES_ALONE else _TILES_TOGETHER
        _place_kernel[(cdiv(num_tiles, together),)](
            routing.chosen_TC, count_BE, routing.place_TC, routing.row_X, routing.start_E1, num_tokens, num_tiles,
            together, **sizes, LANES=next_power_of_2(num_experts), COUNTED=16, num_warps=num_warps,
        )  # fmt: skip
    return routing


@triton.jit
def _best(choice_TL):
    """Returns the lane of each row's largest value, the first of equals, [T, 1]."""
    return tl.argmax(choice_TL, 1, tie_break_left=True)[:, None]


@triton.jit
def _in_best_groups(
    choice_TL, lane_L, TILE: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    SIZE_PADDED: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
):  # fmt: skip
    """Returns 1 for the lanes of each row's best groups, else 0."""
    choice_XS = tl.reshape(choice_TL, [TILE * GROUPS_PADDED, SIZE_PADDED])
    rank_X = tl.max(choice_XS, 1)
    if BY_TWO:
        is_first_XS = tl.arange(0, SIZE_PADDED)[None, :] == _best(choice_XS)
        rank_X += tl.max(tl.where(is_first_XS, float("-inf"), choice_XS), 1)
    group_G = tl.arange(0, GROUPS_PADDED)
    rank_TG = tl.where((group_G < NUM_GROUPS)[None, :], tl.reshape(rank_X, [TILE, GROUPS_PADDED]), float("-inf"))
    found_TL = tl.zeros(choice_TL.shape, tl.int32)
    for _ in tl.static_range(NUM_CHOSEN_GROUPS):
        best_T1 = _best(rank_TG)
        rank_TG = tl.where(group_G[None, :] == best_T1, float("-inf"), rank_TG)
        found_TL += ((lane_L // SIZE_PADDED)[None, :] == best_T1).to(tl.int32)
    return found_TL


@triton.jit
def _scores(logit_TL, is_real_L, SCORING: tl.constexpr):
    if SCORING == "softmax":
        logit_TL = tl.where(is_real_L[None, :], logit_TL, float("-inf"))
        weight_TL = tl.exp(logit_TL - tl.max(logit_TL, 1)[:, None])
        return weight_TL / tl.sum(weight_TL, 1)[:, None]
    return 1 / (1 + tl.exp(-logit_TL))


@triton.jit
def _starts(start_ptr, expert_L, is_real_L, count_L, is_stored, FIRST_OWN: tl.constexpr, NUM_OWN: tl.constexpr):
    """Returns where each expert's places begin, the rank's own experts first, and stores those of its own."""
    begin_L = tl.cumsum(count_L, 0) - count_L
    before_own = tl.sum(tl.where(expert_L < FIRST_OWN, count_L, 0), 0)
    begin_L = tl.where(expert_L < FIRST_OWN, begin_L + tl.sum(count_L, 0), begin_L) - before_own
    is_own_L = is_real_L & (expert_L >= FIRST_OWN) & (expert_L < FIRST_OWN + NUM_OWN)
    tl.store(start_ptr + expert_L - FIRST_OWN, begin_L, mask=is_own_L & is_stored)
    tl.store(start_ptr + NUM_OWN, tl.sum(tl.where(is_own_L, count_L, 0), 0), mask=is_stored)
    return begin_L


@triton.jit(do_not_specialize=["num_tokens", "scaling"])
def _route_kernel(
    logits_ptr,  # [T, E], last stride 1
    bias_ptr,  # fp32 [E]; read only with HAS_BIAS
    chosen_ptr,  # int64 [T, C], contiguous
    weight_ptr,  # fp32 [T, C], contiguous
    place_ptr,  # int64 [T, C], contiguous; written only if IS_ALONE, as are the next two
    row_ptr,  # int64 [T * C]
    start_ptr,  # int32 [NUM_OWN + 1]
    count_ptr,  # int32 [B, E], contiguous; written only unless IS_ALONE
    num_tokens,
    scaling,
    logits_stride_t,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,  # tokens
    FIRST_OWN: tl.constexpr,
    NUM_OWN: tl.constexpr,  # experts of this rank
    CHOSEN_PADDED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,  # 0: from all
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ALONE: tl.constexpr,  # a single tile
):  # grid: (B,)
    LOWEST: tl.constexpr = -1e38  # of experts that may be chosen; two of them add up to a finite number
    token_T = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    lane_L = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    expert_L = lane_L // SIZE_PADDED * GROUP_SIZE + lane_L % SIZE_PADDED
    is_real_L = (lane_L % SIZE_PADDED < GROUP_SIZE) & (lane_L // SIZE_PADDED < NUM_GROUPS)
    is_real_T = token_T < num_tokens
    at_TL = logits_ptr + token_T[:, None] * logits_stride_t + expert_L[None, :]
    logit_TL = tl.load(at_TL, mask=is_real_T[:, None] & is_real_L[None, :], other=0.0).to(tl.float32)
    score_TL = _scores(logit_TL, is_real_L, SCORING)
    choice_TL = logit_TL if SCORING == "top_sigmoid" else score_TL
    if HAS_BIAS:
        choice_TL += tl.load(bias_ptr + expert_L, mask=is_real_L, other=0.0)[None, :]
    choice_TL = tl.where(choice_TL > LOWEST, choice_TL, LOWEST)  # replaces NaN too
    choice_TL = tl.where(is_real_L[None, :], choice_TL, float("-inf"))
    if NUM_CHOSEN_GROUPS:
        open_TL = _in_best_groups(
            choice_TL, lane_L, TILE, NUM_GROUPS, GROUPS_PADDED, SIZE_PADDED, NUM_CHOSEN_GROUPS, SCORING == "sigmoid"
        )
        choice_TL = tl.where(open_TL > 0, choice_TL, float("-inf"))

    choice_C = tl.arange(0, CHOSEN_PADDED)
    lane_TC = tl.zeros([TILE, CHOSEN_PADDED], tl.int32)
    weight_TC = tl.zeros([TILE, CHOSEN_PADDED], tl.float32)
    taken_TL = tl.zeros(choice_TL.shape, tl.int32)
    for number in tl.static_range(NUM_CHOSEN):
        best_T1 = _best(choice_TL)
        is_best_TL = lane_L[None, :] == best_T1
        weight_T1 = tl.sum(tl.where(is_best_TL, score_TL, 0.0), 1)[:, None]
        lane_TC = tl.where((choice_C == number)[None, :], best_T1, lane_TC)
        weight_TC = tl.where((choice_C == number)[None, :], weight_T1, weight_TC)
        choice_TL = tl.where(is_best_TL, float("-inf"), choice_TL)
        taken_TL += is_best_TL.to(tl.int32)
    if NORMALIZE:
        least: tl.constexpr = 1e-20 if SCORING == "sigmoid" else 0.0
        weight_TC = weight_TC / (tl.sum(weight_TC, 1) + least)[:, None]
    pair_TC = token_T[:, None] * NUM_CHOSEN + choice_C[None, :]
    is_real_TC = is_real_T[:, None] & (choice_C < NUM_CHOSEN)[None, :]
    chosen_TC = lane_TC // SIZE_PADDED * GROUP_SIZE + lane_TC % SIZE_PADDED
    tl.store(chosen_ptr + pair_TC, chosen_TC.to(tl.int64), mask=is_real_TC)
    tl.store(weight_ptr + pair_TC, weight_TC * scaling, mask=is_real_TC)

    taken_TL = tl.where(is_real_T[:, None], taken_TL, 0)
    count_L = tl.sum(taken_TL, 0)
    if IS_ALONE:
        start_L = _starts(start_ptr, expert_L, is_real_L, count_L, True, FIRST_OWN, NUM_OWN)
        place_TL = start_L[None, :] + tl.cumsum(taken_TL, 0) - taken_TL
        for number in tl.static_range(NUM_CHOSEN):
            lane_T1 = tl.sum(tl.where((choice_C == number)[None, :], lane_TC, 0), 1)[:, None]
            place_T = tl.sum(tl.where(lane_L[None, :] == lane_T1, place_TL, 0), 1)
            tl.store(place_ptr + token_T * NUM_CHOSEN + number, place_T.to(tl.int64), mask=is_real_T)
            tl.store(row_ptr + place_T, token_T, mask=is_real_T)
    else:
        tl.store(count_ptr + tl.program_id(0) * NUM_EXPERTS + expert_L, count_L, mask=is_real_L)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "together"])
def _place_kernel(
    chosen_ptr,  # int64 [T, C], contiguous
    count_ptr,  # int32 [B, E], contiguous
    place_ptr,  # int64 [T, C], contiguous
    row_ptr,  # int64 [T * C]
    start_ptr,  # int32 [NUM_OWN + 1]
    num_tokens,
    num_tiles,
    together,  # tiles of tokens of a program
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    FIRST_OWN: tl.constexpr,
    NUM_OWN: tl.constexpr,
    LANES: tl.constexpr,  # E, padded
    COUNTED: tl.constexpr,  # tiles whose counts are added at once
):  # grid: (ceil(B / together),)
    first_tile = tl.program_id(0) * together
    lane_L = tl.arange(0, LANES)
    is_real_L = lane_L < NUM_EXPERTS
    before_L = tl.zeros([LANES], tl.int32)
    total_L = tl.zeros([LANES], tl.int32)
    for tile in range(0, num_tiles, COUNTED):
        tile_B = tile + tl.arange(0, COUNTED)
        is_real_BL = (tile_B < num_tiles)[:, None] & is_real_L[None, :]
        count_BL = tl.load(count_ptr + tile_B[:, None] * NUM_EXPERTS + lane_L[None, :], mask=is_real_BL, other=0)
        before_L += tl.sum(tl.where((tile_B < first_tile)[:, None], count_BL, 0), 0)
        total_L += tl.sum(count_BL, 0)
    start_L = _starts(start_ptr, lane_L, is_real_L, total_L, first_tile == 0, FIRST_OWN, NUM_OWN)
    next_L = start_L + before_L
    for tile in range(first_tile, tl.minimum(first_tile + together, num_tiles)):
        token_T = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        is_real_T = token_T < num_tokens
        taken_TL = tl.zeros([TILE, LANES], tl.int32)
        for number in tl.static_range(NUM_CHOSEN):
            chosen_T = tl.load(chosen_ptr + token_T * NUM_CHOSEN + number, mask=is_real_T, other=LANES)
            taken_TL += (lane_L[None, :] == chosen_T[:, None]).to(tl.int32)
        place_TL = next_L[None, :] + tl.cumsum(taken_TL, 0) - taken_TL
        for number in tl.static_range(NUM_CHOSEN):
            chosen_T = tl.load(chosen_ptr + token_T * NUM_CHOSEN + number, mask=is_real_T, other=LANES)
            place_T = tl.sum(tl.where(lane_L[None, :] == chosen_T[:, None], place_TL, 0), 1)
            tl.store(place_ptr + token_T * NUM_CHOSEN + number, place_T.to(tl.int64), mask=is_real_T)
            tl.store(row_ptr + place_T, token_T, mask=is_real_T)
        next_L += tl.sum(taken_TL, 0)
