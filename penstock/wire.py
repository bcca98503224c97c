"""Converts between the protobuf messages of `proto/penstock/v1` and `penstock.types`."""

from __future__ import annotations

from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any

from penstock.errors import InvalidInput
from penstock.kv.adapter_files import AdapterRef
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.rpc.measured import MAX_TOTAL, drop_false_figures
from penstock.types import (
    CacheStats,
    ChunkSpeed,
    Epoch,
    FinishReason,
    Grammar,
    GrammarKind,
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

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # limit of one gRPC message, enough for a million token ids

_LOAD_KINDS = {
    "cache": CacheStats,
    "requests": RequestTotals,
    "prefill_steps": StepTotals,
    "decode_steps": StepTotals,
    "chunks": ChunkSpeed,
}
_LOAD_PARTS = {name: (kind, attrgetter(*(field.name for field in fields(kind)))) for name, kind in _LOAD_KINDS.items()}
_LOAD_SCALARS = [field.name for field in fields(WorkerLoad) if field.name not in (*_LOAD_KINDS, "metrics", "adapters")]
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
_OUTCOME_TO_WIRE = {
    HintOutcome.ACCEPTED: common_pb2.HINT_OUTCOME_ACCEPTED,
    HintOutcome.CLIPPED: common_pb2.HINT_OUTCOME_CLIPPED,
    HintOutcome.REFUSED: common_pb2.HINT_OUTCOME_REFUSED,
}
_OUTCOME_FROM_WIRE = {wire: outcome for outcome, wire in _OUTCOME_TO_WIRE.items()}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}

# `SamplingParams` and its message have the same field names, so that a new plain field needs no conversion of its own.
_SAMPLING_MESSAGES = ("grammar", "bad_sequences")
_SAMPLING_FIELDS = {
    name: field
    for name, field in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items()
    if name not in _SAMPLING_MESSAGES
}
_SAMPLING_MAPS = [name for name, field in _SAMPLING_FIELDS.items() if field.message_type is not None]
_SAMPLING_LISTS = [name for name, field in _SAMPLING_FIELDS.items() if field.is_repeated and name not in _SAMPLING_MAPS]
_SAMPLING_SCALARS = [name for name, field in _SAMPLING_FIELDS.items() if not field.is_repeated]
_OPTIONAL_SCALARS = [
    field.name for field in fields(SamplingParams) if field.default is None and field.name in _SAMPLING_SCALARS
]
_read_scalars = attrgetter(*_SAMPLING_SCALARS)

_GRAMMAR_TO_WIRE = {
    GrammarKind.JSON_SCHEMA: common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: common_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: common_pb2.GRAMMAR_KIND_LARK,
    GrammarKind.CHOICE: common_pb2.GRAMMAR_KIND_CHOICE,
    GrammarKind.STRUCTURAL_TAG: common_pb2.GRAMMAR_KIND_STRUCTURAL_TAG,
}
_GRAMMAR_FROM_WIRE = {wire: kind for kind, wire in _GRAMMAR_TO_WIRE.items()}


def finish_reason_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason:
    return _FINISH_TO_WIRE[reason] if reason else common_pb2.FINISH_REASON_UNSPECIFIED


def finish_reason_from_wire(wire: common_pb2.FinishReason) -> FinishReason | None:
    return _FINISH_FROM_WIRE.get(wire)


def lane_to_wire(lane: Lane) -> common_pb2.Lane:
    return _LANE_TO_WIRE[lane]


def lane_from_wire(wire: common_pb2.Lane, default: Lane = Lane.STANDARD) -> Lane:
    return _LANE_FROM_WIRE.get(wire, default)


def lane_from_name(name: str, field: str = "lane") -> Lane:
    """Parses the name of a lane. Raises InvalidInput."""
    try:
        return Lane(name)
    except ValueError:
        raise InvalidInput(field, f"is {name!r}; give one of {', '.join(Lane)}") from None


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """Returns a message with every field set, so that workers need not resolve defaults."""
    wire = common_pb2.SamplingParams()
    set_sampling(wire, sampling)
    return wire


def set_sampling(wire: common_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Fills an empty message in place; see `sampling_to_wire`."""
    for name, value in zip(_SAMPLING_SCALARS, _read_scalars(sampling), strict=True):
        if value is not None:
            setattr(wire, name, value)
    for name in _SAMPLING_LISTS:
        getattr(wire, name).extend(getattr(sampling, name))
    for name in _SAMPLING_MAPS:
        getattr(wire, name).update(getattr(sampling, name))
    for token_ids in sampling.bad_sequences:
        wire.bad_sequences.add(token_ids=token_ids)
    if sampling.grammar is not None:
        wire.grammar.CopyFrom(grammar_to_wire(sampling.grammar))


def sampling_from_wire(wire: common_pb2.SamplingParams) -> SamplingParams:
    """Reads a message from `sampling_to_wire`. Clients' messages go through `router.api.sampling_fields` instead."""
    values: dict[str, Any] = dict(zip(_SAMPLING_SCALARS, _read_scalars(wire), strict=True))
    for name in _OPTIONAL_SCALARS:
        if not wire.HasField(name):
            values[name] = None
    for name in _SAMPLING_LISTS:
        values[name] = tuple(getattr(wire, name))
    for name in _SAMPLING_MAPS:
        values[name] = dict(getattr(wire, name))
    values["bad_sequences"] = tuple(tuple(sequence.token_ids) for sequence in wire.bad_sequences)
    values["grammar"] = grammar_from_wire(wire.grammar) if wire.HasField("grammar") else None
    return SamplingParams(**values)


def grammar_to_wire(grammar: Grammar) -> common_pb2.Grammar:
    return common_pb2.Grammar(kind=_GRAMMAR_TO_WIRE[grammar.kind], source=grammar.source)


def grammar_from_wire(wire: common_pb2.Grammar, field: str = "sampling.grammar") -> Grammar:
    """Reads a grammar. Raises InvalidInput for a kind that this version does not know."""
    kind = _GRAMMAR_FROM_WIRE.get(wire.kind)
    if kind is None:
        raise InvalidInput(f"{field}.kind", f"is {wire.kind}; give one of {', '.join(GrammarKind)}")
    return Grammar(kind, wire.source)


def logprob_to_wire(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    message = common_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob)
    add = message.top.add  # takes half the time of a list of messages, which protobuf would copy
    for token, value in logprob.top:
        add(token_id=token, logprob=value)
    return message


def logprob_from_wire(wire: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(wire.token_id, wire.logprob, tuple((top.token_id, top.logprob) for top in wire.top))


def transfer_key_to_wire(key: TransferKey) -> worker_pb2.TransferKey:
    return worker_pb2.TransferKey(
        transfer_id=key.transfer_id, sender_epoch=key.sender_epoch, receiver_epoch=key.receiver_epoch
    )


def transfer_key_from_wire(wire: worker_pb2.TransferKey) -> TransferKey:
    return TransferKey(TransferId(wire.transfer_id), Epoch(wire.sender_epoch), Epoch(wire.receiver_epoch))


def load_to_wire(load: WorkerLoad) -> worker_pb2.Load:
    return worker_pb2.Load(**asdict(load))


def load_from_wire(wire: worker_pb2.Load) -> WorkerLoad:
    """Reads a report. A figure that cannot have been measured, such as NaN, reads as unknown."""
    if not _is_plausible(wire):
        wire = worker_pb2.Load.FromString(wire.SerializeToString())
        drop_false_figures(wire, MAX_TOTAL)
    scalars: dict[str, Any] = {name: getattr(wire, name) for name in _LOAD_SCALARS}
    return WorkerLoad(
        **scalars,
        **{name: kind(*read(getattr(wire, name))) for name, (kind, read) in _LOAD_PARTS.items()},
        metrics=dict(wire.metrics),
        adapters=tuple(wire.adapters),
    )


def _is_plausible(load: worker_pb2.Load) -> bool:
    """Returns whether all doubles are in bounds. Takes a tenth of the time of walking all fields of the message."""
    prefill, decode, requests, chunks = load.prefill_steps, load.decode_steps, load.requests, load.chunks
    figures = (
        load.prefill_tokens_per_s,
        load.step_s,
        load.adapter_load_s,
        prefill.contexts,
        prefill.seconds,
        decode.contexts,
        decode.seconds,
        requests.first_token_s,
        requests.decode_s,
        chunks.step_s,
        chunks.chunked_s,
        chunks.token_s,
        chunks.pair_s,
        *load.metrics.values(),
    )
    return min(figures) >= 0.0 and sum(figures) <= MAX_TOTAL  # a NaN among them makes the sum NaN


def adapter_to_wire(adapter: AdapterRef | None) -> worker_pb2.Adapter | None:
    if adapter is None:
        return None
    return worker_pb2.Adapter(name=adapter.name, revision=adapter.revision, path=adapter.path)


def adapter_from_wire(wire: worker_pb2.Adapter) -> AdapterRef | None:
    """Returns None for an absent message, which reads as an empty one."""
    return AdapterRef(wire.name, wire.revision, wire.path) if wire.revision else None


def kv_hints_to_wire(hints: KvHints) -> common_pb2.KvHints | None:
    return common_pb2.KvHints(**asdict(hints)) if hints else None


def kv_hints_from_wire(wire: common_pb2.KvHints) -> KvHints:
    """Reads hints. Raises InvalidInput for values out of bounds; an absent message has no hints."""
    hints = KvHints(
        session=wire.session,
        fork_of=wire.fork_of,
        pin_s=wire.pin_s,
        priority=wire.priority,
        demote=wire.demote,
        prefetch_s=wire.prefetch_s if wire.HasField("prefetch_s") else None,
        end_session=wire.end_session,
        only=wire.only,
    )
    hints.check()
    return hints


def hint_answer_to_wire(answer: HintAnswer) -> common_pb2.HintAnswer:
    return common_pb2.HintAnswer(
        hint=answer.hint,
        outcome=_OUTCOME_TO_WIRE[answer.outcome],
        reason=answer.reason,
        pages=answer.num_pages,
        worker_id=answer.worker_id,
    )


def hint_answer_from_wire(wire: common_pb2.HintAnswer) -> HintAnswer:
    outcome = hint_outcome_from_wire(wire.outcome)
    return HintAnswer(Hint(wire.hint), outcome, wire.reason, wire.pages, wire.worker_id)


def hint_outcome_from_wire(wire: common_pb2.HintOutcome) -> HintOutcome:
    """Reads an outcome; one that this version does not know counts as refused."""
    return _OUTCOME_FROM_WIRE.get(wire, HintOutcome.REFUSED)


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
