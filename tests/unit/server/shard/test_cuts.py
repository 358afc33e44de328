"""A shard's side of a cut."""

from __future__ import annotations

import asyncio

import pytest
from shardam_testing.held_shard import held_shard
from shardam_testing.waiting import wait_for

from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.v1 import common_pb2, cut_pb2
from shardam_server.shard.services.cuts import Cuts


def test_a_hold_whose_caller_dies_while_it_begins_lasts_no_longer_than_it_was_to() -> None:
    with held_shard() as held:
        identity, holding = held.identity, held.shard.holding

        async def adopt(request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
            raise AssertionError(f"there is no plan {request.plan}")

        async def hold_and_die() -> None:
            cuts = Cuts(held.shard, None, 0, holding.release, adopt)
            header = common_pb2.RequestHeader(
                protocol_version=PROTOCOL_VERSION, cluster_id="c" * 32, incarnation=identity.incarnation
            )
            asked = asyncio.create_task(cuts.hold(cut_pb2.HoldRequest(header=header, hold_id=5, hold_s=0.05)))
            while not holding.held:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

        with held.held_changes():
            held.run(hold_and_die())
            wait_for("the hold to end", lambda: not holding.held)
