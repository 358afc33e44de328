"""Random runs of a sync group under loss, reordering and repetition of messages and crashes of every process.

What must hold is PROTOCOL.md, section 5: no half step, no step applied twice, no acknowledged part lost, one decision
everywhere; and the group goes on once faults have stopped.
"""

from __future__ import annotations

import time

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shardam_server.shard.groups.values import Reduce
from shardam_testing.group_model.contents import NUM_RANKS, NUM_SHARDS, PLANS, Plan
from shardam_testing.group_model.world import EVENTS, MOST_PLACES, PHASES, Phase, World

ranks = st.integers(0, NUM_RANKS - 1)
shards = st.integers(0, NUM_SHARDS - 1)
reduces = st.sampled_from(["mean", "sum"])

BATCH = 100
"""Examples of one seed."""

LONG = settings(deadline=None, database=None, print_blob=True, stateful_step_count=30, suppress_health_check=list(HealthCheck))

MOST_EVENT = len(EVENTS) * MOST_PLACES - 1
"""What happens, and to which message."""

plans = st.one_of(
    st.lists(st.sampled_from(PLANS), min_size=NUM_RANKS, max_size=NUM_RANKS),
    st.sampled_from(PLANS).map(lambda plan: [plan] * NUM_RANKS),
)

phases = st.sampled_from(PHASES)

seeds = st.integers(0, 2**16)

AFTERMATH = 30
"""What happens after a fault before anything else: it meets messages of its phase in any order."""


class GroupMachine(RuleBasedStateMachine):
    """Home, three shards and three workers."""

    world: World

    @initialize(
        seed=seeds,
        reduce=reduces,
        max_rows=st.sampled_from([0, 0, 0, 4]),
        syncs=st.booleans(),
        odd=st.booleans(),
        messages=st.just(0) | st.integers(0, 120),
    )
    def start(self, seed: int, reduce: Reduce, max_rows: int, syncs: bool, odd: bool, messages: int) -> None:
        self.world = World(seed, reduce, max_rows, syncs=syncs, odd=odd)
        self.world.run_well(messages)

    @rule(events=st.lists(st.integers(0, MOST_EVENT), min_size=15, max_size=60))
    def go_wrong(self, events: list[int]) -> None:
        self.world.speak()
        for event in events:
            self.world.happen(event)

    @rule(seed=seeds, events=st.integers(1, 100))
    def go_astray(self, seed: int, events: int) -> None:
        self.world.run_badly(seed, events)

    @rule(messages=st.integers(1, 80))
    def go_well(self, messages: int) -> None:
        self.world.run_well(messages)

    @rule(plans=plans, messages=st.integers(0, 40))
    def plan(self, plans: list[Plan], messages: int) -> None:
        for rank, plan in enumerate(plans):
            self.world.plan(rank, plan)
        self.world.run_well(messages)

    @rule(shard=shards, how=st.sampled_from(["kill", "power loss", "base"]), phase=phases, seed=seeds)
    def end_life(self, shard: int, how: str, phase: Phase, seed: int) -> None:
        self.world.run_to(phase)
        if how == "base":
            self.world.shards[shard].write_base()
        else:
            self.world.crash(shard, power_loss=how == "power loss")
        self.world.run_badly(seed, AFTERMATH)

    @rule(rank=ranks, messages=st.integers(0, 100))
    def time_out(self, rank: int, messages: int) -> None:
        """A worker stands still, and the others' step is given up."""
        self.world.stopped.add(rank)
        self.world.run_well(messages)
        self.world.give_up()
        self.world.stopped.remove(rank)

    @rule(
        rank=ranks,
        what=st.sampled_from(["drop", "kill", "start", "restart", "leave", "restart all"]),
        terms=st.tuples(st.integers(2, NUM_RANKS), reduces),
        phase=phases,
        seed=seeds,
    )
    def change_members(self, rank: int, what: str, terms: tuple[int, Reduce], phase: Phase, seed: int) -> None:
        self.world.run_to(phase)
        match what:
            case "drop":
                self.world.drop(rank)
            case "kill":
                self.world.kill(rank)
            case "leave":
                self.world.leave(rank)
            case "restart all":
                self.world.restart_all(*terms)
            case _:
                self.world.start(rank, restarted=what == "restart")
        self.world.run_badly(seed, AFTERMATH)

    @rule(rank=ranks, shard=shards)
    def misuse(self, rank: int, shard: int) -> None:
        self.world.misuse(rank, shard)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.recover()


def run_for(seconds: float, seed: int) -> int:
    """Runs random examples for a while, from a seed; returns how many.

    Raises:
        AssertionError: something that must hold does not; the shortest example that was found is printed.
    """
    start, batches = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        machine = hypothesis.seed(seed * 2**32 + batches)(type("Seeded", (GroupMachine,), {}))
        run_state_machine_as_test(machine, settings=settings(LONG, max_examples=BATCH))
        batches += 1
    return batches * BATCH
