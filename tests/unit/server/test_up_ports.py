"""Which ports `shardam up` gives its children when it may choose them."""

from __future__ import annotations

import asyncio

import pytest

from shardam_server import up
from shardam_server.settings import UpSettings


def test_the_admin_api_gets_another_free_port_at_each_start_until_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([7001, 7002, 7003])
    monkeypatch.setattr(up, "free_port", lambda host: next(ports))

    async def answers(host: str, port: int) -> None:
        assert port == 7002

    async def start_twice_then_answer() -> list[int]:
        cluster = up._Cluster(UpSettings.model_validate({"redis": "redis://127.0.0.1:1/0", "admin_port": 0}), None)
        tried = [cluster._port_of_admin(), cluster._port_of_admin()]
        monkeypatch.setattr(cluster._probe, "admin_ready", answers)
        await cluster._admin_ready(1)
        return [*tried, cluster._port_of_admin()]

    assert asyncio.run(start_twice_then_answer()) == [7001, 7002, 7002]


def test_a_port_that_was_asked_for_stays() -> None:
    cluster = up._Cluster(UpSettings.model_validate({"redis": "redis://127.0.0.1:1/0", "admin_port": 7005}), None)
    assert [cluster._port_of_admin(), cluster._port_of_admin()] == [7005, 7005]
