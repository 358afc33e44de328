"""Random examples of the codec for a while, from a seed."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardam_proto import wire
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_testing.codec_fuzz.differential import check_answer, check_reading
from shardam_testing.codec_fuzz.messages import PLANS, NoShard, Plan, build, lay_out, second_half
from shardam_testing.codec_fuzz.mutations import MUTATIONS, Mutation, mutate
from shardam_testing.codec_fuzz.twins import DIMS, Twins, twins

BATCH = 200
"""Examples of one seed, and of one pair of shards."""

LONG = settings(deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck))

Answer = tuple[bytes, int, int, bytes | None]
"""Rows, number of sections, chunk index and, of a PullChangedResponse, positions."""

TABLES = [common_pb2.TableInfo(spec=common_pb2.TableSpec(dim=dim), table_id=dim) for dim in DIMS]
"""Of messages that no shard gets."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """A message and what becomes of it.

    Attributes:
        plan: the message.
        by_hand: laid out as clients do, rather than by protobuf.
        mutations: what is changed of its bytes.
    """

    plan: Plan
    by_hand: bool
    mutations: tuple[Mutation, ...]

    def encode(self, message: embedding_pb2.ExchangeRequest) -> bytes:
        """Returns the bytes that are sent."""
        return self.changed(lay_out(message) if self.by_hand else message.SerializeToString())

    def changed(self, data: bytes) -> bytes:
        """Returns bytes after the mutations."""
        for mutation in self.mutations:
            data = mutate(data, mutation)
        return data


FEW_MUTATIONS = st.lists(MUTATIONS, max_size=3).map(tuple)

SENT = st.builds(Sent, plan=PLANS, by_hand=st.booleans(), mutations=st.just(()) | FEW_MUTATIONS)

ANSWERS = st.tuples(st.binary(max_size=80), st.integers(0, 12), st.integers(0, 3), st.none() | st.binary(max_size=24))


def play(pair: Twins, examples: list[Sent]) -> None:
    """Plays messages on one stream of two shards.

    Raises:
        AssertionError: as Twins.play.
    """
    messages: list[bytes] = []
    number = pair.one.next_number
    for sent in examples:
        message = build(sent.plan, pair.one.client, number, pair.one.tables)
        messages.append(sent.encode(message))
        number += sent.plan.ahead == 0 and bool(getattr(message, message.WhichOneof("request") or "").header.number)
        if sent.plan.kind == "chunk":
            messages.append(sent.changed(second_half(message, _rows_of(message)).SerializeToString()))
    pair.play(messages)


def _rows_of(message: embedding_pb2.ExchangeRequest) -> bytes:
    """Returns the bytes of gradients that a plan's chunk leaves for the next."""
    return bytes(max(0, min(message.push.total_bytes, 2**16) - len(message.push.row_ids)))


def answer_bytes(drawn: Answer, request_id: int) -> bytes:
    """Returns the answer of a pull as a shard lays it out."""
    rows, num_sections, chunk, positions = drawn
    message_type = embedding_pb2.PullResponse if positions is None else embedding_pb2.PullChangedResponse
    head = message_type(
        header=common_pb2.ResponseHeader(shard=1, request_id=request_id, change_number=2**40, chunk_index=chunk, num_chunks=3),
        sections=[common_pb2.Section(table_id=2**63 + index, num_rows=index) for index in range(num_sections)],
    )
    name = "pull" if positions is None else "pull_changed"
    kind = embedding_pb2.ExchangeResponse.DESCRIPTOR.fields_by_name[name].number
    payloads = [positions or b"", rows]
    frame = wire.frame(kind, head.SerializeToString(), [len(payload) for payload in payloads], request_id=request_id)
    filled = [payload for payload in payloads if payload] or [b""]
    return b"".join(piece for both in zip(frame.prefixes, filled, strict=True) for piece in both)


def read_request(sent: Sent) -> bool:
    """Compares the readings of a request; returns whether the codec read it."""
    return check_reading(sent.encode(build(sent.plan, NoShard(), 1, TABLES)), embedding_pb2.ExchangeRequest)


def read_answer(drawn: Answer, request_id: int, mutations: tuple[Mutation, ...]) -> bool:
    """Compares the readings of an answer; returns whether the codec read it."""
    data = answer_bytes(drawn, request_id)
    for mutation in mutations:
        data = mutate(data, mutation)
    check_answer(data)
    return check_reading(data, embedding_pb2.ExchangeResponse)


def run_readings(max_examples: int, seed: int, *, shrink: bool = True) -> Counter[str]:
    """Compares the codec's readings of random requests and answers with protobuf's; returns how many it read itself.

    Args:
        max_examples: of requests, and of answers.
        seed: where they follow from.
        shrink: look for the shortest example that fails.

    Raises:
        AssertionError: they differ; the shortest example that was found is printed.
    """
    counts: Counter[str] = Counter()

    def request(sent: Sent) -> None:
        counts["requests"] += 1
        counts["requests read"] += read_request(sent)

    def answer(drawn: Answer, request_id: int, mutations: tuple[Mutation, ...]) -> None:
        counts["answers"] += 1
        counts["answers read"] += read_answer(drawn, request_id, mutations)

    _run(given(SENT)(request), max_examples, seed, shrink)
    _run(given(ANSWERS, st.integers(1, 2**64 - 1), FEW_MUTATIONS)(answer), max_examples, seed, shrink)
    return counts


def run_shards(max_examples: int, seed: int, *, shrink: bool = True) -> Counter[str]:
    """Plays random messages on two shards; returns how many, how many were refused, and how many streams were ended.

    Args:
        max_examples: streams.
        seed: where they follow from.
        shrink: look for the shortest example that fails.

    Raises:
        AssertionError: as Twins.play; the shortest example that was found is printed.
    """
    with twins() as pair:
        _run(given(st.lists(SENT, min_size=1, max_size=4))(lambda examples: play(pair, examples)), max_examples, seed, shrink)
        pair.check_alive()
        return Counter(messages=pair.num_messages, refused=pair.num_refused, ended=pair.num_ended)


def _run(test: Callable[[], None], max_examples: int, seed: int, shrink: bool) -> None:
    phases = LONG.phases if shrink else (Phase.generate,)
    hypothesis.seed(seed)(settings(LONG, max_examples=max_examples, phases=phases)(test))()


def run_for(seconds: float, seed: int) -> Counter[str]:
    """Runs random examples for a while, from a seed; returns counts of what was done.

    Raises:
        AssertionError: something that must hold does not; the shortest example that was found is printed.
    """
    start, batches, counts = time.monotonic(), 0, Counter[str]()
    while time.monotonic() - start < seconds:
        counts += run_readings(BATCH, seed * 2**32 + batches)
        counts += run_shards(BATCH, seed * 2**32 + batches)
        batches += 1
    return counts
