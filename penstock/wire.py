"""Conversions between the wire messages of `proto/penstock/v1` and `penstock.types`. Nothing else."""

from __future__ import annotations

from dataclasses import asdict, fields

from penstock.errors import InvalidInput
from penstock.types import (
    CacheStats,
    Epoch,
    FinishReason,
    Labels,
    Lane,
    Member,
    RequestTotals,
    Role,
    SamplingParams,
    StepTotals,
    TokenLogprob,
    TransferId,
    TransferKey,
    WorkerId,
    WorkerLoad,
)
from penstock.v1 import admin_pb2, common_pb2, worker_pb2

_REQUEST_TOTALS = [field.name for field in fields(RequestTotals)]
_CACHE_STATS = [field.name for field in fields(CacheStats)]
_FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
_LANE_TO_WIRE = {
    Lane.INTERACTIVE: common_pb2.LANE_INTERACTIVE,
    Lane.STANDARD: common_pb2.LANE_STANDARD,
    Lane.BULK: common_pb2.LANE_BULK,
}
_LANE_FROM_WIRE = {wire: lane for lane, wire in _LANE_TO_WIRE.items()}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}


def finish_reason_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason:
    return _FINISH_TO_WIRE[reason] if reason else common_pb2.FINISH_REASON_UNSPECIFIED


def finish_reason_from_wire(wire: common_pb2.FinishReason) -> FinishReason | None:
    return _FINISH_FROM_WIRE.get(wire)


def lane_to_wire(lane: Lane) -> common_pb2.Lane:
    return _LANE_TO_WIRE[lane]


def lane_from_wire(wire: common_pb2.Lane, default: Lane = Lane.STANDARD) -> Lane:
    return _LANE_FROM_WIRE.get(wire, default)


def lane_from_name(name: str, field: str = "lane") -> Lane:
    """Raises InvalidInput."""
    try:
        return Lane(name)
    except ValueError:
        raise InvalidInput(field, f"is {name!r}; give one of {', '.join(Lane)}") from None


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Every field set: a worker resolves no defaults."""
    wire = common_pb2.SamplingParams()
    set_sampling(wire, sampling)
    return wire


def set_sampling(wire: common_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """`sampling_to_wire` into a message that has none of its fields set."""
    wire.max_tokens = sampling.max_tokens
    wire.min_tokens = sampling.min_tokens
    wire.temperature = sampling.temperature
    wire.top_k = sampling.top_k
    wire.top_p = sampling.top_p
    wire.min_p = sampling.min_p
    wire.repetition_penalty = sampling.repetition_penalty
    wire.presence_penalty = sampling.presence_penalty
    wire.frequency_penalty = sampling.frequency_penalty
    if sampling.logit_bias:
        wire.logit_bias.update(sampling.logit_bias)
    wire.seed = sampling.seed
    wire.n = sampling.n
    wire.stop.extend(sampling.stop)
    wire.stop_token_ids.extend(sampling.stop_token_ids)
    wire.ignore_eos = sampling.ignore_eos
    if sampling.logprobs is not None:
        wire.logprobs = sampling.logprobs


def sampling_from_wire(wire: common_pb2.SamplingParams) -> SamplingParams:
    """Of a message that `sampling_to_wire` made; between workers, never from a client."""
    return SamplingParams(
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=dict(wire.logit_bias),
        seed=wire.seed,
        n=wire.n,
        stop=tuple(wire.stop),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
    )


def logprob_to_wire(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    top = [common_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprob.top]
    return common_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def logprob_from_wire(wire: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(wire.token_id, wire.logprob, tuple((top.token_id, top.logprob) for top in wire.top))


def transfer_key_to_wire(key: TransferKey) -> worker_pb2.TransferKey:
    return worker_pb2.TransferKey(
        transfer_id=key.transfer_id, sender_epoch=key.sender_epoch, receiver_epoch=key.receiver_epoch
    )


def transfer_key_from_wire(wire: worker_pb2.TransferKey) -> TransferKey:
    return TransferKey(TransferId(wire.transfer_id), Epoch(wire.sender_epoch), Epoch(wire.receiver_epoch))


def load_to_wire(load: WorkerLoad) -> worker_pb2.Load:
    return worker_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        queued_prefill_tokens=load.queued_prefill_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        step_s=load.step_s,
        cache=worker_pb2.CacheStats(**asdict(load.cache)),
        prefill_steps=worker_pb2.StepTotals(**asdict(load.prefill_steps)),
        decode_steps=worker_pb2.StepTotals(**asdict(load.decode_steps)),
        num_open=load.num_open,
        requests=worker_pb2.RequestTotals(**asdict(load.requests)),
        leaving=load.leaving,
    )


def load_from_wire(wire: worker_pb2.Load) -> WorkerLoad:
    return WorkerLoad(
        num_running=wire.num_running,
        num_waiting=wire.num_waiting,
        free_pages=wire.free_pages,
        total_pages=wire.total_pages,
        queued_prefill_tokens=wire.queued_prefill_tokens,
        prefill_tokens_per_s=wire.prefill_tokens_per_s,
        step_s=wire.step_s,
        cache=CacheStats(**{name: getattr(wire.cache, name) for name in _CACHE_STATS}),
        prefill_steps=_totals_from_wire(wire.prefill_steps),
        decode_steps=_totals_from_wire(wire.decode_steps),
        num_open=wire.num_open,
        requests=RequestTotals(**{name: getattr(wire.requests, name) for name in _REQUEST_TOTALS}),
        leaving=wire.leaving,
    )


def _totals_from_wire(wire: worker_pb2.StepTotals) -> StepTotals:
    return StepTotals(wire.steps, wire.tokens, wire.contexts, wire.seconds)


def labels_to_wire(labels: Labels) -> worker_pb2.Labels:
    return worker_pb2.Labels(host=labels.host, rack=labels.rack, zone=labels.zone)


def labels_from_wire(wire: worker_pb2.Labels) -> Labels:
    return Labels(wire.host, wire.rack, wire.zone)


def member_to_wire(member: Member) -> admin_pb2.Member:
    return admin_pb2.Member(
        worker_id=member.worker_id,
        epoch=member.epoch,
        role=member.role.value,
        address=member.address,
        cohort=member.cohort,
    )


def member_from_wire(wire: admin_pb2.Member) -> Member:
    return Member(WorkerId(wire.worker_id), Epoch(wire.epoch), Role(wire.role), wire.address, wire.cohort)
