"""Readers together, a writer alone."""

from __future__ import annotations

import threading

from shardam_testing.waiting import wait_for

from shardam_server.shard.locks import ReadWriteLock


def test_readers_hold_the_lock_together() -> None:
    lock = ReadWriteLock()
    both_inside = threading.Barrier(2, timeout=10)

    def read() -> None:
        with lock.read():
            both_inside.wait()

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not both_inside.broken


def test_a_writer_is_alone_among_readers_and_writers() -> None:
    lock = ReadWriteLock()
    inside: list[str] = []
    seen: list[list[str]] = []

    def write(name: str) -> None:
        for _ in range(200):
            with lock.write():
                inside.append(name)
                seen.append(list(inside))
                inside.remove(name)

    def read(name: str) -> None:
        for _ in range(200):
            with lock.read():
                seen.append([name] if not inside else [name, *inside])

    threads = [threading.Thread(target=write, args=(f"w{index}",)) for index in range(2)]
    threads += [threading.Thread(target=read, args=(f"r{index}",)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 800
    assert all(len(names) == 1 for names in seen)


def test_a_waiting_writer_goes_before_a_new_reader() -> None:
    lock = ReadWriteLock()
    order: list[str] = []
    writer_done = threading.Event()

    def write() -> None:
        with lock.write():
            order.append("writer")
        writer_done.set()

    def read() -> None:
        with lock.read():
            order.append("reader")

    with lock.read():
        writer = threading.Thread(target=write)
        writer.start()
        while not lock._num_waiting_writers:
            pass
        reader = threading.Thread(target=read)
        reader.start()
    writer.join(10)
    reader.join(10)
    assert order == ["writer", "reader"]


def test_a_try_to_read_never_waits_for_a_writer() -> None:
    lock = ReadWriteLock()
    assert (lock.enter_at_once(), lock.enter_at_once()) == (True, True)
    lock.leave()
    lock.leave()
    with lock.write():
        assert not lock.enter_at_once()
    with lock.read():
        writer = threading.Thread(target=lambda: _write_once(lock))
        writer.start()
        wait_for("the writer to wait", lambda: not _can_read(lock))
    writer.join(10)
    assert _can_read(lock)


def _write_once(lock: ReadWriteLock) -> None:
    with lock.write():
        pass


def _can_read(lock: ReadWriteLock) -> bool:
    held = lock.enter_at_once()
    if held:
        lock.leave()
    return held
