"""A cluster's tables as its shards list them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from shardam._link import ShardLink
from shardam._parts import options_value
from shardam._session import Session
from shardam._unary_reads import unary_read
from shardam._values import TableInfo, TableStats
from shardam_proto.errors import UnknownTable
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, table_pb2

PAGE_SIZE = 1000
"""Tables of one page of a listing; a schema has about 100 bytes."""


def listed(session: Session, link: ShardLink, names: Sequence[str] = ()) -> Iterator[common_pb2.TableInfo]:
    """Yields a shard's tables, by name.

    Args:
        session: the client.
        link: the shard.
        names: only these; none: all.

    Raises:
        UnknownTable: one of the names is no table's.
        ShardsMoved: as Session.answer.
        ShardamError: as Session.answer.
    """
    after_name = ""
    while True:
        request = table_pb2.ListTablesRequest(names=names, page_size=PAGE_SIZE, after_name=after_name)
        answer = session.answer(unary_read(session, link, lambda target: target.tables.ListTables, request))
        yield from answer.tables
        after_name = answer.next_after_name
        if not after_name:
            return


def listed_by_home(session: Session, names: Sequence[str] = ()) -> list[common_pb2.TableInfo]:
    """Returns home's tables; raises as listed."""
    return session.ask(lambda shards: list(listed(session, shards.links[0], names)))


def unknown_table(session: Session, cluster: str, name: str) -> UnknownTable:
    """Returns the error that says which tables there are instead."""
    names = [table.spec.name for table in listed_by_home(session)]
    near = difflib.get_close_matches(name, names, n=5)
    if near:
        hint = f"near names: {', '.join(map(repr, near))}"
    else:
        hint = f"the cluster has {len(names)} tables: {', '.join(map(repr, names[:8])) or 'none yet'}"
    return UnknownTable(
        f"cluster {cluster!r} has no table {name!r}; {hint}. Create one with create_table(shardam.TableSpec(name, dim))",
        metadata={"table": name},
    )


def table_stats(session: Session, info: TableInfo) -> TableStats:
    """Returns a table over all shards, each at its own moment.

    Raises:
        ShardamError: as listed.
    """
    shards = session.ask(lambda shards: [table for link in shards.links for table in listed(session, link, [info.name])])
    home = shards[0]
    return TableStats(
        table_step=home.table_step,
        num_rows=sum(shard.num_rows for shard in shards),
        rows_per_shard=tuple(shard.num_rows for shard in shards),
        record_bytes=sum(shard.record_bytes for shard in shards),
        index_bytes=sum(shard.index_bytes for shard in shards),
        saturated_values=sum(shard.saturated_values for shard in shards),
        nonfinite_pushes=sum(shard.nonfinite_pushes for shard in shards),
        last_options=options_value(home.last_options) if home.HasField("last_options") else None,
    )


def table_info(table: common_pb2.TableInfo) -> TableInfo:
    """Returns what never changes of a table."""
    return TableInfo(TableSpec.from_proto(table.spec), table.table_id, table.table_seed)
