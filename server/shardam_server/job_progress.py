"""Follows a job of home until it has ended, with one line of progress on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import checkpoint_pb2, job_pb2
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.checkpoint_words import FAILED, has_ended, job_state, job_words, kind_word
from shardam_server.cluster_calls import HOME, REQUEST_ID
from shardam_server.command_errors import CommandError, Interrupted

POLL_S = 0.25
"""Between two looks at a job: a line that moves four times a second seems to move by itself."""

MAX_LINE = 118
"""Characters of the line of progress; a longer one would wrap, and the next would not cover it."""


class Progress(Protocol):
    """Shows how far a job is."""

    def show(self, job: job_pb2.Job) -> None:
        """Shows it now."""
        ...

    def end(self) -> None:
        """Leaves the place for what is printed next."""
        ...


class Silence:
    """Shows nothing."""

    def show(self, job: job_pb2.Job) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""


class ProgressLine:
    """One line on stderr that is written over."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, job: job_pb2.Job) -> None:
        """Writes the line if it has changed."""
        line = job_words(job)[:MAX_LINE]
        if line != self._shown:
            sys.stderr.write(f"\r{line.ljust(len(self._shown))}")
            sys.stderr.flush()
            self._shown = line

    def end(self) -> None:
        """Clears the line."""
        if self._shown:
            sys.stderr.write(f"\r{' ' * len(self._shown)}\r")
            sys.stderr.flush()
            self._shown = ""


def make_progress() -> Progress:
    """Returns a line of progress if stderr is a terminal, else silence."""
    return ProgressLine() if sys.stderr.isatty() else Silence()


def follow(calls: ShardCalls, job: job_pb2.Job, progress: Progress) -> job_pb2.Job:
    """Waits until a job has ended and returns it as it is then; a failed one, too (`check_done`).

    Home may be away for a moment, as while shards take a checkpoint over; it is asked again until it has been silent for the
    deadline of a call.

    Raises:
        ShardamError: home did not answer in that time, or does not know the job: it has been started again since.
        Interrupted: Ctrl-C; the job goes on.
    """
    heard_at = time.monotonic()
    try:
        while not has_ended(job):
            progress.show(job)
            time.sleep(POLL_S)
            request = checkpoint_pb2.GetJobRequest(id=job.id)
            try:
                job = calls.call(HOME, lambda stubs: stubs.checkpoints.GetJob, request, REQUEST_ID).job
            except ShardamError as error:
                if not error.rule.retryable or time.monotonic() - heard_at > calls.timeout_s:
                    raise
            else:
                heard_at = time.monotonic()
    except KeyboardInterrupt as error:
        subject = f"{kind_word(job)} of checkpoint {job.checkpoint!r}" if job.checkpoint else kind_word(job)
        raise Interrupted(
            f"interrupted, but {subject} goes on in the cluster as job {job.id}: `shardam checkpoint jobs` shows how it ends"
        ) from error
    finally:
        progress.end()
    return job


def check_done(job: job_pb2.Job) -> None:
    """Raises if a job has failed.

    Raises:
        CommandError: with its reason.
    """
    if job_state(job) == FAILED:
        subject = f"{kind_word(job)} of checkpoint {job.checkpoint!r}" if job.checkpoint else kind_word(job)
        raise CommandError(f"{subject} failed ({job.reason or 'INTERNAL'}): {job.problem}")
