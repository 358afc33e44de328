"""Entity tags of rows, and what a request may ask of a row before it is changed (If-Match, If-None-Match)."""

from __future__ import annotations

import dataclasses
import re

from shardam_proto.errors import BadOption, EtagMismatch
from shardam_proto.v1 import row_pb2

_TAG = re.compile(r'"([0-9]{1,4}):([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,20})"', re.ASCII)
_MAX_UINT64 = 2**64 - 1


@dataclasses.dataclass(frozen=True)
class StateId:
    """Which state of which shard: within one, a change number stands for one change.

    A restart keeps it where the shard's journal does; a shard that starts empty has another lineage, a restored one another
    timeline, and both may count their changes from a lower number again.

    Attributes:
        shard: the shard.
        lineage: lineage of its state.
        timeline: timeline of its state.
    """

    shard: int
    lineage: int
    timeline: int


@dataclasses.dataclass(frozen=True)
class RowTag:
    """Which state of a row an answer showed.

    Attributes:
        owner: the owner's state.
        change_number: the owner's change number when the row last changed.
    """

    owner: StateId
    change_number: int

    def __str__(self) -> str:
        return f'"{self.owner.shard}:{self.owner.lineage}:{self.owner.timeline}:{self.change_number}"'

    @classmethod
    def parse(cls, text: str) -> RowTag:
        """Reads an ETag header's value.

        Raises:
            BadOption: it is not the tag of a row.
        """
        match = _TAG.fullmatch(text)
        numbers = [] if match is None else [int(group) for group in match.groups()]
        if not numbers or max(numbers) > _MAX_UINT64:
            raise BadOption(
                f"If-Match {text[:80]!r} is not the ETag of one row; send the ETag that the row was answered with, in its "
                "quotes, or *",
                metadata={"if_match": text[:80]},
            )
        *owner, change_number = numbers
        return cls(StateId(*owner), change_number)


@dataclasses.dataclass(frozen=True)
class Precondition:
    """What must hold of a row for a request to change it. All None: nothing is asked.

    Attributes:
        tag: the state that the row must be in.
        exists: whether the row must exist or must not.
    """

    tag: RowTag | None = None
    exists: bool | None = None

    @classmethod
    def parse(cls, if_match: str | None, if_none_match: str | None) -> Precondition:
        """Reads the headers of a request that changes one row.

        Args:
            if_match: one ETag, or * for a row that exists; None: not sent.
            if_none_match: * for a row that does not exist; None: not sent.

        Raises:
            BadOption: another value, or both headers.
        """
        if if_match is not None and if_none_match is not None:
            raise BadOption("If-Match and If-None-Match ask for opposite things; send one of them")
        if if_none_match is not None:
            if if_none_match != "*":
                raise BadOption(
                    f"If-None-Match {if_none_match[:80]!r} is not supported on a change: * asks that the row does not exist",
                    metadata={"if_none_match": if_none_match[:80]},
                )
            return cls(exists=False)
        if if_match is None:
            return cls()
        return cls(exists=True) if if_match == "*" else cls(tag=RowTag.parse(if_match))

    def check_owner(self, owner: StateId) -> None:
        """Refuses a tag of another state than the owner's; the change number is the owner's to check.

        Args:
            owner: the state of the shard that owns the row.

        Raises:
            EtagMismatch: the row moved, or its shard lost its rows or was restored since the tag was given.
        """
        if self.tag is None or self.tag.owner == owner:
            return
        raise EtagMismatch(
            f"the ETag {self.tag} is of another state than shard {owner.shard} has now (lineage {owner.lineage}, timeline "
            f"{owner.timeline}); read the row and decide again",
            metadata={"shard": str(owner.shard), "lineage": str(owner.lineage), "timeline": str(owner.timeline)},
        )

    def to_proto(self) -> row_pb2.RowCondition:
        """Returns what the shard checks within the change."""
        if self.tag is not None:
            return row_pb2.RowCondition(change_number=self.tag.change_number)
        return row_pb2.RowCondition() if self.exists is None else row_pb2.RowCondition(exists=self.exists)
