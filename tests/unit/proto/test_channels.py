"""What every sender of a token refuses to send, and what a failed call means."""

from __future__ import annotations

import grpc
import pytest

from shardam_proto.channels import token_metadata, translate
from shardam_proto.errors import BadToken, VersionMismatch


def test_a_token_travels_as_a_bearer() -> None:
    assert token_metadata(None) == ()
    assert token_metadata("s3kret~!") == (("authorization", "Bearer s3kret~!"),)


@pytest.mark.parametrize("token", ["sekret\n", "sekret\u00fc", "sek ret", " sekret", "sekret\x00", "sekret\x7f", ""])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(BadToken, match="a token is one or more visible ASCII characters without spaces") as caught:
        token_metadata(token)
    assert "sek" not in str(caught.value)
    assert ("strip it" in caught.value.message) == (token != token.strip())


def test_a_token_of_another_type_is_refused_and_not_shown() -> None:
    with pytest.raises(BadToken, match="a token is a string, got bytes") as caught:
        token_metadata(b"sekret")  # type: ignore[arg-type]  # what a caller may pass by mistake
    assert "sek" not in str(caught.value)


class _Refused(grpc.RpcError):
    """A call that a shard of an older version does not know."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNIMPLEMENTED

    def details(self) -> str:
        return "Method not found!"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_a_call_that_a_shard_does_not_know_is_a_matter_of_versions() -> None:
    error = translate(_Refused(), "shard 0 at 127.0.0.1:7070")
    assert isinstance(error, VersionMismatch)
    assert error.message.startswith("shard 0 at 127.0.0.1:7070 does not know this call (Method not found!): it runs another ")
