"""What connect refuses before it asks anything of Redis."""

from __future__ import annotations

import pickle

import pytest

import shardam
from shardam._session_options import SessionOptions
from shardam.errors import BadToken

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def _no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise AssertionError(f"connected to {url}")

    monkeypatch.setattr("shardam._discovery.connect_redis", refuse)


@pytest.mark.parametrize("token", ["sekret\n", "sekret\u00fc", "sek ret"])
def test_a_token_that_no_shard_can_have_is_refused_before_any_connection(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadToken, match="visible ASCII characters without spaces") as caught:
        shardam.connect(NOWHERE, token=token)
    assert "sek" not in str(caught.value)
    monkeypatch.setenv("SHARDAM_TOKEN", token)
    with pytest.raises(BadToken):
        shardam.connect(NOWHERE)
    unpickled = pickle.loads(pickle.dumps(shardam.Cluster(SessionOptions(NOWHERE, "default", None, 1.0))))
    with pytest.raises(BadToken):
        unpickled.tables()
