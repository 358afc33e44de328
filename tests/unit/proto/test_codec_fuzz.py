"""Some random readings of the codec beside protobuf's, of which `make fuzz` has the rest, and what they would find."""

from __future__ import annotations

import dataclasses

import pytest
from shardam_testing.codec_fuzz.runs import run_readings

from shardam_proto import wire

NUM_EXAMPLES = 300
"""Enough for every mistake below, whatever the seed."""


def test_what_the_codec_takes_apart_is_what_protobuf_reads() -> None:
    counts = run_readings(NUM_EXAMPLES, seed=0)
    assert counts["requests read"] > NUM_EXAMPLES // 10
    assert counts["answers read"] > NUM_EXAMPLES // 10


@pytest.mark.parametrize("mistake", ["a payload is left out", "a length is taken as it is", "what follows is looked over"])
def test_a_mistake_of_the_codec_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    split, open_envelope = wire.split, wire.open_envelope

    def left_out(data: bytes, start: int, end: int) -> wire.Split | None:
        found = split(data, start, end)
        return found and dataclasses.replace(found, first=memoryview(b""))

    def looked_over(data: bytes) -> wire.Envelope | None:
        ends = (open_envelope(data[: len(data) - size]) for size in range(8))
        return next((found for found in ends if found is not None), None)

    match mistake:
        case "a payload is left out":
            monkeypatch.setattr(wire, "split", left_out)
        case "a length is taken as it is":
            monkeypatch.setattr(wire, "_MAX_LENGTH_BYTES", 10)
        case _:
            monkeypatch.setattr(wire, "open_envelope", looked_over)
    with pytest.raises(AssertionError):
        run_readings(4 * NUM_EXAMPLES, seed=0, shrink=False)
