"""Keeps children alive and stops them in order; knows how, not what: the children of `up` are made in up.py.

A dead child is started again after a delay that doubles with each exit before it was ready; one that leaves is not, and others
take the place of its whole group. The first request to stop drains group by group; the second kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence

from shardam_server.children import Child, describe_exit
from shardam_server.command_errors import CommandError, UsageError

_log = logging.getLogger(__name__)
_REMIND_S = 10.0  # how often a long wait for readiness is logged
_LAST_WORDS = "shardam: "  # how a command of ours begins the line that says why it ends
_KILL_WAIT_S = 10.0  # the kernel ends a killed process at once, unless it hangs in a device
_LEAVE_S = 30.0  # a child that has not heard that its group leaves hears it when it renews its name, some seconds later


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """When a dead child is started again.

    Attributes:
        delay_s: wait before the first start after an exit; doubles with each further exit before readiness.
        max_delay_s: longest wait.
        limit: exits in a row before readiness after which the supervisor gives up.
        final_status: exit status by which a child says, before readiness, that no other start would end otherwise.
        leaving_status: exit status by which a child says that others take its group's place.
    """

    delay_s: float = 0.5
    max_delay_s: float = 15.0
    limit: int = 5
    final_status: int | None = None
    leaving_status: int | None = None

    def delay_after(self, exits: int) -> float:
        """Returns the wait in seconds after that many exits in a row before readiness (0: it had been ready)."""
        doublings = min(max(exits - 1, 0), 64)  # 2**64 is beyond every limit and still a float
        return float(min(self.delay_s * 2**doublings, self.max_delay_s))


class GaveUp(CommandError):
    """A child ended too often before it was ready."""


class StartRefused(UsageError):
    """A child cannot run with its settings; the message has its own last words."""


class Kept:
    """A child that is kept alive.

    Args:
        child: the child.
        wait_ready: waits until the process with the given id serves.
        policy: when it is started again.
        after: what must be ready whenever this child is started.
        aftermath: what its end means for what it held, for the log line that reports it.
        has_left: asked where it ended with `policy.final_status`: whether others take its group's place. None: they do not.
    """

    def __init__(
        self,
        child: Child,
        wait_ready: Callable[[int], Awaitable[None]],
        policy: RestartPolicy,
        *,
        after: Sequence[Kept] = (),
        aftermath: str = "",
        has_left: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.child = child
        self.ready = asyncio.Event()
        self.starts = 0
        self._wait_ready = wait_ready
        self._policy = policy
        self._after = after
        self._aftermath = f"; {aftermath}" if aftermath else ""
        self._has_left = has_left

    async def run(self) -> None:
        """Starts the child, and again whenever it ends, until it leaves or this is cancelled (which leaves it running).

        Raises:
            GaveUp: `policy.limit` exits in a row came before readiness.
            StartRefused: it ended with `policy.final_status` before readiness.
            CommandError: the program cannot be run at all.
        """
        exits = 0
        while True:
            for other in self._after:
                await other.ready.wait()
            try:
                pid = self.child.start()
            except OSError as error:
                raise CommandError(f"{self.child.name} cannot be started: {error}") from error
            self.starts += 1
            was_ready, status = await self._run_once(pid)
            if status == self._policy.leaving_status:
                _log.info("%s has left", self.child.name)
                return
            if status == self._policy.final_status and not was_ready:
                if self._has_left is not None and await self._has_left():
                    return
                raise StartRefused(_refusal(self.child))
            exits = 0 if was_ready else exits + 1
            if exits >= self._policy.limit:
                raise GaveUp(_obituary(self.child, status, exits))
            delay_s = self._policy.delay_after(exits)
            aftermath = self._aftermath if was_ready else ""
            _log.warning("%s %s%s; starting it again in %g s", self.child.name, describe_exit(status), aftermath, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self, pid: int) -> tuple[bool, int]:
        """Waits for the end of one process; returns whether it had been ready, and its exit status."""
        end = asyncio.ensure_future(self.child.wait())
        ready = asyncio.ensure_future(self._wait_ready(pid))
        try:
            await asyncio.wait({end, ready}, return_when=asyncio.FIRST_COMPLETED)
            was_ready = ready.done()
            if was_ready:
                ready.result()  # raises what went wrong in the probe itself
                self.ready.set()
                _log.info("%s is ready (pid %d, start %d)", self.child.name, pid, self.starts)
            return was_ready, await end
        finally:
            self.ready.clear()
            end.cancel()
            ready.cancel()
            await asyncio.gather(end, ready, return_exceptions=True)


def _obituary(child: Child, status: int, exits: int) -> str:
    lines = "".join(f"\n  {line}" for line in child.last_lines) or " none"
    times = "once" if exits == 1 else f"{exits} times in a row"
    return f"{child.name} {describe_exit(status)}, {times} before it was ready: stopped. Its last lines:{lines}"


def _refusal(child: Child) -> str:
    """Words the end of a child that cannot run with its settings: what it said last, which names the remedy."""
    lines = list(child.last_lines)
    last = next((index for index in reversed(range(len(lines))) if lines[index].startswith(_LAST_WORDS)), 0)
    reason = "\n  ".join(lines[last:]).removeprefix(_LAST_WORDS)
    return f"{child.name} cannot start: {reason or 'it said nothing'}"


class Group:
    """Children that are stopped together.

    Args:
        members: the children.
        replace: makes those that take their place, once all of them have left and ended; None: nobody does.
        drain_s: seconds that a child may take to end after SIGTERM, if it did not hear that its group leaves.
        when_replaced: awaited when all new ones are ready.

    Attributes:
        members: the present children.
    """

    def __init__(
        self,
        members: Sequence[Kept],
        *,
        replace: Callable[[], Awaitable[Sequence[Kept]]] | None = None,
        drain_s: float = _LEAVE_S,
        when_replaced: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.members = list(members)
        self._replace = replace
        self._drain_s = drain_s
        self._when_replaced = when_replaced
        self._ready = asyncio.Event()

    async def wait_ready(self) -> None:
        """Waits until all of the present children are ready, those that take their place, too."""
        await self._ready.wait()

    def not_ready(self) -> list[str]:
        """Returns the names of those that are not ready."""
        return [kept.child.name for kept in self.members if not kept.ready.is_set()]

    async def run(self) -> None:
        """Keeps the children alive, and those that take their place, until cancelled.

        Raises:
            CommandError: as Kept.run.
        """
        replaced = False
        while True:
            await self._run_until_left(self._when_replaced if replaced else None)
            self._ready.clear()
            if self._replace is None:
                raise CommandError(f"{self.members[0].child.name} has left, and there is nobody to take its place")
            self.members = list(await self._replace())
            replaced = True

    async def _run_until_left(self, when_ready: Callable[[], Awaitable[None]] | None) -> None:
        """Runs until one child leaves and all have ended."""
        with _cancelling(asyncio.ensure_future(self._note_ready(when_ready))) as ready:
            keeping = [asyncio.ensure_future(kept.run()) for kept in self.members]
            try:
                waiting = {ready, *keeping}
                while not (ended := [task for task in keeping if task.done()]):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    if ready in done:
                        ready.result()
                if all(task.exception() is not None for task in ended):
                    ended[0].result()  # raises why a child cannot be kept
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(self._end(kept) for kept in self.members))

    async def _note_ready(self, when_ready: Callable[[], Awaitable[None]] | None) -> None:
        for kept in self.members:
            await kept.ready.wait()
        self._ready.set()
        if when_ready is not None:
            await when_ready()

    async def _end(self, kept: Kept) -> None:
        """Waits for the end of a child whose group leaves; what it held is with those that take its place."""
        if not kept.child.alive:
            return
        if not await kept.child.wait_for(_LEAVE_S):
            _log.warning("%s has not left within %g s: it is ended", kept.child.name, _LEAVE_S)
            await kept.child.stop(self._drain_s)


@contextlib.contextmanager
def _cancelling(task: asyncio.Future[None]) -> Iterator[asyncio.Future[None]]:
    """Cancels a task that is not needed any more."""
    try:
        yield task
    finally:
        task.cancel()


class Supervisor:
    """Runs groups of children and stops them, the last group first.

    Args:
        groups: the children.
        drain_s: seconds that a child may take to end after SIGTERM.
    """

    def __init__(self, groups: Sequence[Group], drain_s: float) -> None:
        self._groups = groups
        self._drain_s = drain_s
        self._requests = 0
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    def request_stop(self, why: str) -> None:
        """Asks for a drain; asked again, for a kill. To be called in the event loop's thread."""
        self._requests += 1
        if self._requests == 1:
            _log.info("%s: draining (once more to kill at once)", why)
            self._stop.set()
        else:
            _log.warning("%s: killing all processes", why)
            self._kill.set()

    async def run(self, when_ready: Callable[[], Awaitable[None]]) -> bool:
        """Runs until a stop is requested and every child has ended.

        Args:
            when_ready: awaited once, when all children are ready.

        Returns:
            True: every child ended by itself in time.

        Raises:
            GaveUp: a child ended too often before it was ready; the others have been stopped.
            CommandError: a child cannot be started; the others have been stopped.
        """
        keep = asyncio.ensure_future(self._keep_all(when_ready))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({keep, stop}, return_when=asyncio.FIRST_COMPLETED)
            if keep.done():
                keep.result()
        finally:
            keep.cancel()
            stop.cancel()
            await asyncio.gather(keep, stop, return_exceptions=True)
            orderly = await self._end()
        return orderly

    async def _keep_all(self, when_ready: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for group in self._groups:
                    tasks.create_task(group.run())
                await _all_ready(self._groups)
                await when_ready()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one is why the others were cancelled

    async def _end(self) -> bool:
        """Drains, or kills when asked to; returns whether every child ended by itself."""
        drain = asyncio.ensure_future(self._drain())
        kill = asyncio.ensure_future(self._kill.wait())
        await asyncio.wait({drain, kill}, return_when=asyncio.FIRST_COMPLETED)
        if drain.done():
            kill.cancel()
            return drain.result()
        drain.cancel()
        children = [kept.child for group in self._groups for kept in group.members if kept.child.alive]
        for child in children:
            child.send(signal.SIGKILL)
        await asyncio.gather(drain, *(child.wait_for(_KILL_WAIT_S) for child in children), return_exceptions=True)
        return False

    async def _drain(self) -> bool:
        orderly = True
        for group in reversed(self._groups):
            ended = await asyncio.gather(*(kept.child.stop(self._drain_s) for kept in group.members))
            for kept, by_itself in zip(group.members, ended, strict=True):
                if not by_itself:
                    _log.warning("%s did not end within %g s of SIGTERM and was killed", kept.child.name, self._drain_s)
            orderly = orderly and all(ended)
        return orderly


async def _all_ready(groups: Sequence[Group]) -> None:
    """Waits until all are ready, and says from time to time who is not."""
    waiting = {asyncio.ensure_future(group.wait_ready()) for group in groups}
    try:
        while waiting:
            _, waiting = await asyncio.wait(waiting, timeout=_REMIND_S, return_when=asyncio.ALL_COMPLETED)
            if waiting:
                names = ", ".join(name for group in groups for name in group.not_ready())
                _log.info("still waiting for: %s", names or "nothing")
    finally:
        for task in waiting:
            task.cancel()
