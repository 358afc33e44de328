"""The thread that sends a client's changes one after the other, so that an optimizer's step need not wait for the wire."""

from __future__ import annotations

import collections
import logging
import threading
from concurrent.futures import Future

from shardam._changes import AnyChange, ChangeLog
from shardam._session import Session
from shardam_proto.errors import ClientClosed, ShardamError, make_error

logger = logging.getLogger(__name__)

MAX_QUEUED = 32
"""Changes that wait at most; a caller that is faster waits with the next one instead of filling memory."""


class _Settle:
    """Asks the thread to send a change again that got no answer in time."""


class Pusher:
    """One client's queue of changes. Thread-safe.

    Args:
        session: the client.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._log = ChangeLog(session)
        self._queue: collections.deque[tuple[AnyChange | _Settle, Future[None] | None]] = collections.deque()
        self._wake = threading.Condition()
        self._num_submitted = 0
        self._num_finished = 0
        self._errors: collections.deque[BaseException] = collections.deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="shardam-pusher", daemon=True)
        self._thread.start()

    def run(self, change: AnyChange) -> None:
        """Sends a change after all queued ones and waits until every shard has applied it.

        Raises:
            ShardamError: the change's own error, or that of an earlier queued one.
        """
        self.raise_error()
        self._submit(change, future := Future[None]())
        future.result()

    def submit(self, change: AnyChange) -> None:
        """Queues a change; its error is raised by the next call that asks.

        Raises:
            ShardamError: an earlier queued change failed; this one is not queued.
        """
        self.raise_error()
        self._submit(change, None)

    def flush(self) -> None:
        """Waits until everything queued so far has been applied.

        Raises:
            ShardamError: a queued change failed.
        """
        self._session.check()
        with self._wake:
            target = self._num_submitted
            self._wake.wait_for(lambda: self._num_finished >= target)
            unsettled = self._log.has_unsettled and not self._queue
        self.raise_error()
        if unsettled:
            self._submit(_Settle(), future := Future[None]())
            future.result()

    def finish(self) -> None:
        """Waits for what is queued, at the end; an error that no caller has seen yet is raised.

        Raises:
            ShardamError: a queued change failed.
        """
        if not self._session.ended:
            self.flush()
            return
        with self._wake:
            self._wake.wait_for(lambda: self._num_finished >= self._num_submitted)
            error = self._errors.popleft() if self._errors else None
        if error is not None and not self._session.failure_was_raised:
            raise error

    def raise_error(self) -> None:
        """Raises the oldest error of a queued change, once.

        Raises:
            ShardamError: that error, or what ended this client.
        """
        self._session.check()
        with self._wake:
            error = self._errors.popleft() if self._errors else None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread after the change it is sending. What is queued is dropped: flush first."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def _submit(self, item: AnyChange | _Settle, future: Future[None] | None) -> None:
        with self._wake:
            self._wake.wait_for(lambda: len(self._queue) < MAX_QUEUED or self._closed)
            if self._closed:
                raise _closed_error()
            self._queue.append((item, future))
            self._num_submitted += 1
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: bool(self._queue) or self._closed)
                if self._closed:
                    self._drop_queue()
                    return
                item, future = self._queue.popleft()
                self._wake.notify_all()
            error = self._send(item, is_queued=future is None)
            with self._wake:
                if error is not None and future is None:
                    self._errors.append(error)
                self._num_finished += 1
                self._wake.notify_all()
            if future is not None:
                _resolve(future, error)
            del item, future, error  # an idle thread keeps no gradients alive

    def _send(self, item: AnyChange | _Settle, *, is_queued: bool) -> BaseException | None:
        try:
            self._settle_former(is_settle=isinstance(item, _Settle))
            if not isinstance(item, _Settle):
                self._session.check()
                self._log.run(item)
        except BaseException as error:  # noqa: BLE001 - the thread's edge: whoever asks next gets the error
            if is_queued:
                logger.warning("a queued change failed: %s", error)
            return error
        return None

    def _settle_former(self, *, is_settle: bool) -> None:
        """Sends a change again whose answer is missing.

        Raises:
            ShardamError: still no answer; or, if asked to settle, why it was refused.
        """
        if not self._log.has_unsettled:
            return
        try:
            self._log.settle()
        except ShardamError as error:
            if self._log.has_unsettled:
                message = f"an earlier change still has no answer, so this one was not sent: {error.message}"
                raise make_error(error.reason, message, error.metadata) from error
            if is_settle:
                raise
            with self._wake:
                self._errors.append(error)  # of the former change; the present one goes on

    def _drop_queue(self) -> None:
        for _, future in self._queue:
            if future is not None:
                future.set_exception(_closed_error())
        self._num_finished += len(self._queue)
        self._queue.clear()
        self._wake.notify_all()


def _closed_error() -> ClientClosed:
    return ClientClosed("this cluster object was closed meanwhile; connect again")


def _resolve(future: Future[None], error: BaseException | None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
