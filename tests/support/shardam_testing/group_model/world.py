"""Three shards, home and three workers, and all that may happen to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.values import GroupTerms, Reduce
from shardam_testing.group_model.contents import NUM_RANKS, NUM_SHARDS, PLANS, Content, Plan, make_content
from shardam_testing.group_model.home import ModelHome
from shardam_testing.group_model.misuse import misuse
from shardam_testing.group_model.network import Network
from shardam_testing.group_model.oracle import GROUP, Oracle
from shardam_testing.group_model.shards import ModelShard
from shardam_testing.group_model.workers import NO_END, ModelWorker

NETWORK_EVENTS = (
    *("deliver",) * 13,
    *("repeat",) * 3,
    *("lose",) * 2,
    *("work",) * 5,
    *("speak",) * 4,
    *("sync",) * 3,
)
"""What may happen to messages, as often as it should."""

EVENTS = (*NETWORK_EVENTS, "kill", "power loss", "drop", "drop", "replace", "leave")
"""What may happen at all."""

SELDOM = 0.05
"""How often something happens to shards and workers."""

MOST = 0.8
"""How often a rank does at a step what others do."""

MOST_PLACES = 2**7
"""To which message it happens: more than there are on their way."""

MORE_STEPS = 2
"""Steps that each worker takes once faults have stopped."""

Phase = Literal["any", "staged", "arrived", "decided", "half confirmed"]
"""Where a step stands."""

PHASES: tuple[Phase, ...] = ("any", "staged", "arrived", "decided", "half confirmed")

MOST_TO_A_PHASE = 120
"""Messages of two steps, and some of workers that join."""

MOST_OF_STEPS = 300
"""Messages that may be delivered until steps are carried out on every shard. For three workers that come anew: 18 to open on
all shards, 6 to join, 4 of home and its peers for each, and 28 for a step."""

MOST_OF_A_CLIENT = 24
"""Messages that may be delivered, beside these, for each client that there ever was: closing one takes 12."""


class World:
    """One cluster with one group.

    Args:
        seed: of gradients.
        reduce: how they are merged.
        max_rows: rows that a shard may hold; 0: no limit.
        syncs: whether shards journal to a disk at once.
        odd: whether workers do all kinds of things by themselves; else, what they are told or what is usual.

    Attributes:
        stopped: ranks whose workers stand still: they say nothing, and what comes to them is lost.
    """

    def __init__(self, seed: int, reduce: Reduce = "mean", max_rows: int = 0, *, syncs: bool = True, odd: bool = False) -> None:
        self._seed = seed
        self._odd = odd
        self._num_contents = 0
        self._turn = 0
        self._num_clients = 0
        self._last_step = NO_END
        self._checked: dict[int, tuple[int, int]] = {}
        self._plans: dict[int, Plan] = {}
        self.counts: list[int] = []
        self.oracle = Oracle()
        self.oracle.row_limit = max_rows
        self.network = Network()
        self.shards = [ModelShard(index, self.network, self.oracle, max_rows, syncs=syncs) for index in range(NUM_SHARDS)]
        self.home = ModelHome(self.shards[0], self.oracle, life=1)
        self.terms = GroupTerms("sync", NUM_RANKS, reduce=reduce)
        self.workers: dict[int, ModelWorker] = {}
        self.stopped: set[int] = set()
        for rank in range(NUM_RANKS):
            self._connect(rank, 0)

    def __str__(self) -> str:
        workers = [(one.rank, one.phase, one.client_id.hex(), one.number, one.step) for one in self.workers.values()]
        groups = [shard.state.groups.find(GROUP) for shard in self.shards]
        return f"workers {workers}, groups {groups}, {self.home.num_closing} closings"

    # -- workers

    def _connect(self, rank: int, restart_count: int) -> None:
        self._num_clients += 1
        client_id = b"client %09d" % self._num_clients
        worker = ModelWorker(rank, client_id, restart_count, self.terms, self._make_content, self.oracle)
        worker.last_step = self._last_step
        self.workers[rank] = worker

    def _make_content(self, rank: int, step: int) -> Content:
        self._num_contents += 1
        plan = self._plans.pop(rank, None) or (self._odd_plan(step, rank) if self._odd else "gradient")
        return make_content(plan, step, rank, [self._seed, self._num_contents])

    def _odd_plan(self, step: int, rank: int) -> Plan:
        """What most ranks do at a step, or a gradient; from the seed."""
        plan = random.Random(self._seed + step).choice([*PLANS, "gradient", "gradient", "gradient"])
        return plan if random.Random(f"{self._seed} {step} {rank}").random() < MOST else "gradient"

    def plan(self, rank: int, plan: Plan) -> None:
        """Says what a rank contributes next."""
        self._plans[rank] = plan

    def kill(self, rank: int) -> None:
        """Ends a worker; what it has sent is on its way."""
        self.workers.pop(rank, None)

    def start(self, rank: int, *, restarted: bool) -> None:
        """Starts a worker in place of what was there; restarted: by its launcher, which counts it."""
        if rank < self.terms.world_size:
            self._connect(rank, self._restart_count(rank) + restarted)

    def _restart_count(self, rank: int) -> int:
        worker, entry = self.workers.get(rank), self.home.entry
        members = [] if entry is None else [one.restart_count for one in entry.group.members if one.rank == rank]
        return max([*members, 0 if worker is None else worker.restart_count])

    def restart_all(self, world_size: int, reduce: Reduce) -> None:
        """Starts all workers again, with other terms."""
        restart_count = max(self._restart_count(rank) for rank in range(NUM_RANKS)) + 1
        self.terms = GroupTerms("sync", world_size, reduce=reduce)
        self.workers.clear()
        for rank in range(world_size):
            self._connect(rank, restart_count)

    def leave(self, rank: int) -> None:
        """Has a worker leave after its step."""
        if rank in self.workers:
            self.workers[rank].wants_to_leave = True

    def drop(self, rank: int) -> None:
        """Home takes a member for gone, whether it is or not."""
        entry = self.home.entry
        for member in () if entry is None else entry.group.members:
            if member.rank == rank:
                self.home.drop(member.client_id)

    # -- what happens

    def speak(self) -> None:
        """Everybody sends what is not answered."""
        self._turn += 1
        by_turns = sorted(self.workers.items(), key=lambda item: (item[0] + self._turn) % NUM_RANKS)
        for rank, worker in by_turns:
            if rank in self.stopped:
                continue
            if worker.phase == "gone":
                self._connect(rank, worker.restart_count)
            for shard, body in self.workers[rank].speak():
                self.network.post(shard, body)
        self.home.speak()

    def deliver(self, place: int = 0, *, keep: bool = False) -> bool:
        """Delivers a message; False: there is none."""
        message = self.network.take(place, keep=keep)
        if message is None:
            return False
        if isinstance(message.to, bytes):
            for rank, worker in self.workers.items():
                if worker.client_id == message.to and rank not in self.stopped:
                    worker.receive(message.body)
            return True
        shard = self.shards[message.to]
        if not shard.receive(message.body):
            assert message.to == 0
            self.home.receive(message.body)
        self._check(shard)
        return True

    def work(self) -> bool:
        """Home does its next thing; False: there is none."""
        done = self.home.work()
        if done:
            self._check(self.shards[0])
        return done

    def _check(self, shard: ModelShard) -> None:
        """Holds a shard that has changed against the oracle."""
        now = (id(shard.state), shard.state.change_number)
        if self._checked.get(shard.index) != now:
            self._checked[shard.index] = now
            self.oracle.check_shard(shard.index, shard.state)

    def crash(self, shard: int, *, power_loss: bool) -> None:
        """A shard ends and starts again."""
        self.shards[shard].crash(power_loss=power_loss)
        if shard == 0:
            self.home = ModelHome(self.shards[0], self.oracle, self.home.life + 1)

    def misuse(self, rank: int, shard: int) -> None:
        """A shard is sent what it must refuse, in the name of a rank's client."""
        worker = self.workers.get(rank)
        if worker is not None and worker.number:
            place = self.shards[shard]
            misuse(place.state, place.incoming(worker.client_id, worker.number))

    def give_up(self) -> None:
        """The time of the pending step is over."""
        if self.home.give_up():
            self._check(self.shards[0])

    def happen(self, event: int) -> None:
        """Lets one thing happen: what it is to, and what it is."""
        place, kind = divmod(event, len(EVENTS))
        match EVENTS[kind]:
            case "deliver":
                self.deliver(place)
            case "repeat":
                self.deliver(place, keep=True)
            case "lose":
                self.network.take(place)
            case "work":
                self.work()
            case "speak":
                self.speak()
            case "sync":
                self.shards[place % NUM_SHARDS].sync()
            case "kill":
                self.crash(place % NUM_SHARDS, power_loss=False)
            case "power loss":
                self.crash(place % NUM_SHARDS, power_loss=True)
            case "drop":
                self.drop(place % NUM_RANKS)
            case "replace":
                self.start(place % NUM_RANKS, restarted=True)
            case "leave":
                self.leave(place % NUM_RANKS)

    def run_badly(self, seed: int, most: int) -> None:
        """Lets things happen that follow from a seed: almost all on the network, so that steps come through."""
        rng = random.Random(seed)
        for _ in range(most):
            kinds = len(EVENTS) if rng.random() < SELDOM else len(NETWORK_EVENTS)
            self.happen(rng.randrange(kinds) + len(EVENTS) * rng.randrange(MOST_PLACES))

    def run_well(self, most: int) -> int:
        """Lets everything go as it should for a number of messages; returns how many there were."""
        for count in range(most):
            if not len(self.network):
                self._catch_up()
            if not self.deliver():
                return count
            while self.work():
                pass
            for shard in self.shards:
                shard.sync()
        return most

    def run_to(self, phase: Phase) -> None:
        """Lets everything go well until a step is in a phase."""
        for _ in range(MOST_TO_A_PHASE):
            steps = [self._step_on(shard) for shard in self.shards]
            match phase:
                case "any":
                    reached = True
                case "staged":
                    reached = any(shard.state.groups.parts() for shard in self.shards)
                case "arrived":
                    reached = self.home.num_arrived > 0
                case "decided":
                    reached = steps[0] > max(steps[1:])
                case "half confirmed":
                    reached = steps[0] == max(steps[1:]) > min(steps[1:])
            if reached:
                return
            self.run_well(1)

    def _step_on(self, shard: ModelShard) -> int:
        entry = shard.state.groups.find(GROUP)
        return 0 if entry is None else entry.step

    def _catch_up(self) -> None:
        while self.work():
            pass
        self.speak()
        for shard in self.shards:
            shard.sync()

    # -- the end of faults

    def recover(self) -> None:
        """Faults stop: the pending step is decided and carried out on every shard, so are more, and then nothing is left to do.

        Raises:
            AssertionError: it takes more messages than it may, or something is left.
        """
        pending = self.oracle.num_decided + 1
        self._run_until(lambda: not self._active() or self._steps_everywhere() >= pending)
        goal = pending + MORE_STEPS
        self._run_until(lambda: all(worker.step > goal for worker in self._active()))
        self._last_step = max((worker.step for worker in self.workers.values()), default=0)
        for worker in self.workers.values():
            worker.last_step = self._last_step
        self._run_until(self._is_done)
        self._check_equal()

    def _active(self) -> list[ModelWorker]:
        return [worker for worker in self.workers.values() if not worker.wants_to_leave]

    def _steps_everywhere(self) -> int:
        return min(self._step_on(shard) for shard in self.shards)

    def _is_done(self) -> bool:
        resting = all(worker.phase in ("idle", "left") for worker in self.workers.values())
        return resting and not self.home.num_closing and not len(self.network)

    def _run_until(self, done: Callable[[], bool]) -> None:
        count, backlog = 0, len(self.network)
        self._heal()
        while not done():
            self._catch_up()
            for _ in range(len(self.network)):
                self.run_well(1)
                count += 1
            most = backlog + MOST_OF_STEPS + MOST_OF_A_CLIENT * self._num_clients
            assert count <= most, f"{count} messages were not enough: {self}"
            self._heal()
        self.counts.append(count)

    def _heal(self) -> None:
        """Home notices who is gone; launchers start the ranks that the group waits for because they have never been there."""
        entry = self.home.entry
        for rank in range(self.terms.world_size):
            gone = rank not in self.workers or self.workers[rank].phase == "left"
            if gone and (entry is None or rank in entry.group.missing_ranks()):
                self._connect(rank, self._restart_count(rank))
        alive = {worker.client_id for worker in self.workers.values()}
        for client_id, client in list(self.shards[0].state.clients):
            if not client.closed and client_id not in alive:
                self.home.drop(client_id)

    def _check_equal(self) -> None:
        """Checks that all shards agree."""
        home = self.shards[0].state
        entry = home.groups.find(GROUP)
        for shard in self.shards:
            self.oracle.check_shard(shard.index, shard.state)
            assert shard.state.groups.find(GROUP) == entry, "a shard knows the group otherwise"
            assert not shard.state.groups.parts(), "a part is left"
            for client_id, client in shard.state.clients:
                other = home.clients.find(client_id)
                if other is None:  # it was gone before it had opened everywhere, and never had a number
                    assert client == ClientEntry(heartbeats=True, last_contact=client.last_contact)
                    continue
                assert (client.last_number, client.closed, client.settled) == (other.last_number, other.closed, other.settled)
                assert client.settled == client.closed, "a client is not settled"
