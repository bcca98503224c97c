"""Checks figures that another process has measured, before they are added to long-lived sums.

A worker with a broken clock, or a damaged message, must not spoil the figures of others: one NaN makes a sum NaN
forever, and one infinite or absurd value outweighs all others.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_TOTAL = 1e18  # most seconds, bytes or tokens that a worker can have counted since its start
MAX_STAGE_MS = 1e10  # the longest stage of one request: a third of a year


def drop_false_figures(message: Message, most: float) -> None:
    """Clears each double of the message, its parts and its maps that is not in [0, `most`], NaN included.

    A cleared field reads as 0, as an unknown one does. Repeated doubles are kept or cleared together.
    """
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
                for key in [key for key, each in value.items() if not 0.0 <= each <= most]:
                    del value[key]
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for part in value if field.is_repeated else (value,):
                drop_false_figures(part, most)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE and not all(
            0.0 <= each <= most for each in (value if field.is_repeated else (value,))
        ):
            message.ClearField(field.name)
