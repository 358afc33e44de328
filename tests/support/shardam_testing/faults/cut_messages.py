"""The messages between home and another shard by which a cut, a checkpoint or a restore goes on, told by their form alone."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shardam_proto.v1 import cut_pb2
from shardam_testing.faults.network_faults import MessageKind

MessageT = TypeVar("MessageT", bound=Message)

LONGEST_HOLD_S = 3600.0
"""Holds are of seconds: what is larger is another message's field that lies where a hold has its time."""

CLIENT_ID_BYTES = 16

LARGEST_BYTES = 2**18
"""Home's requests are smaller, with a thousand clients and more. Large pushes are not looked at in vain."""


def told_request(data: bytes) -> MessageKind | None:
    """Returns which request of home's a message is, if it is one of those."""
    if len(data) > LARGEST_BYTES:
        return None
    cut = parsed(cut_pb2.CutRequest(), data)
    if cut.header.protocol_version and cut.hold_id and cut.task_id and cut.folder:
        return "cut"
    check = parsed(cut_pb2.CheckFilesRequest(), data)
    if check.header.protocol_version and check.task_id and check.folder and check.num_shards:
        return "check"
    adopt = parsed(cut_pb2.AdoptPlanRequest(), data)
    if adopt.header.protocol_version and adopt.plan.startswith("{"):
        return "adopt"
    hold = parsed(cut_pb2.HoldRequest(), data)
    if hold.header.protocol_version and hold.hold_id and 0 < hold.hold_s <= LONGEST_HOLD_S:
        return "hold"
    advance = parsed(cut_pb2.AdvanceRequest(), data)
    if advance.hold_id and advance.targets and all(len(one.client_id) == CLIENT_ID_BYTES for one in advance.targets):
        return "advance"
    return None


def told_reply(data: bytes) -> MessageKind | None:
    """Returns whether a reply says that a shard has written its files."""
    task = parsed(cut_pb2.GetTaskResponse(), data)
    return "written" if task.written.files and task.written.folder else None


def parsed(message: MessageT, data: bytes) -> MessageT:
    """Parses a message that may be of another type; then it is left empty."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.Clear()
    return message
