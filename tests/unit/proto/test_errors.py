"""The error table: every reason once, the same on every front."""

from __future__ import annotations

import grpc
import pytest

from shardam_proto import errors
from shardam_proto.error_details import DETAILS_KEY, pack_status, unpack_error
from shardam_proto.errors import REASONS, ShardamError, ShardLost, make_error


class FailedCall(grpc.RpcError):
    """A failed call with trailing metadata."""

    def __init__(self, trailers: tuple[tuple[str, bytes], ...]) -> None:
        super().__init__()
        self._trailers = trailers

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:  # type: ignore[override]  # grpc's own pairs are named
        return self._trailers


@pytest.mark.parametrize("reason", REASONS)
def test_an_error_keeps_reason_class_message_and_metadata_over_the_wire(reason: str) -> None:
    sent = make_error(reason, "what was wrong", {"table": "t", "acknowledged": "3", "has": "1"})
    received = unpack_error(FailedCall(((DETAILS_KEY, pack_status(sent)),)))
    assert received is not None
    assert type(received) is REASONS[reason].error
    assert (received.reason, received.message, received.metadata["table"]) == (reason, "what was wrong", "t")
    if isinstance(received, ShardLost):
        assert (received.acknowledged, received.has) == (3, 1)


def test_a_call_that_failed_below_shardam_carries_no_error() -> None:
    assert unpack_error(FailedCall(())) is None
    assert unpack_error(FailedCall(((DETAILS_KEY, b""),))) is None


def test_a_reason_of_a_newer_version_is_named_and_not_lost() -> None:
    error = make_error("SOMETHING_NEW", "message", {})
    assert type(error) is ShardamError
    assert "SOMETHING_NEW" in str(error)


def test_http_status_follows_from_the_code_but_for_the_exceptions_the_protocol_lists() -> None:
    overridden = {reason: rule.http_status for reason, rule in REASONS.items() if rule.http_status_override is not None}
    of_sizes = {"TOO_MANY_IDS": 413, "MESSAGE_TOO_LARGE": 413}
    assert overridden == {**of_sizes, "ETAG_MISMATCH": 412, "CHECKPOINT_MISMATCH": 409, "CHECKPOINT_RUNNING": 409}
    assert REASONS["ID_OUT_OF_RANGE"].http_status == 400
    assert REASONS["NOT_READY"].http_status == 503


def test_every_concrete_class_is_in_the_table_under_its_own_reason() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, ShardamError)}
    groups = {ShardamError, errors.InvalidArgument, errors.NotFound, errors.ResourceExhausted, errors.Unavailable}
    assert {rule.error for rule in REASONS.values()} - groups == classes - groups
    for error in classes - groups:
        assert REASONS[error.reason].error is error


def test_users_of_torch_find_the_builtin_classes_they_expect() -> None:
    assert issubclass(errors.IdOutOfRange, IndexError)
    assert issubclass(errors.BadOption, ValueError)
    assert issubclass(errors.UnknownTable, LookupError)
