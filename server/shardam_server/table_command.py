"""`shardam table ACTION`: lists tables, exports one to a file, imports one from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from shardam_proto.table_files import TableFile
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.admin.table_exports import Exported, export_table
from shardam_server.admin.table_imports import Imported, ImportTerms, import_table
from shardam_server.admin.table_infos import ClusterTable, list_tables
from shardam_server.cluster_calls import REQUEST_ID, open_calls
from shardam_server.flags import parse_named, parse_settings
from shardam_server.row_progress import make_row_progress
from shardam_server.subcommands import Action, dispatch
from shardam_server.table_settings import TableExportSettings, TableImportSettings, TableSettings
from shardam_server.table_words import options_to_json, spec_to_json, spelled
from shardam_server.terminal_text import aligned

PAGE_SIZE = 1000
"""Tables that one call names."""

_HEADINGS = ("table", "rows", "dim", "dtype", "step", "last lr", "")


def run_table(arguments: Sequence[str]) -> int:
    """Runs an action; returns its exit status.

    Raises:
        UsageError: there is no such action, or a flag is wrong.
        CommandError: it failed.
        ShardamError: a shard refused or did not answer, or the file is wrong.
    """
    return dispatch("table", ACTIONS, arguments)


def _list(arguments: list[str]) -> int:
    settings = parse_settings("table list", TableSettings, arguments, ACTIONS["list"].about)
    with open_calls(settings, settings.shard_timeout_s) as calls:
        tables = _all_tables(calls)
    if settings.as_json:
        sys.stdout.write(f"{json.dumps({'tables': [_to_json(table) for table in tables]})}\n")
    elif tables:
        sys.stdout.write("".join(f"{line}\n" for line in aligned([_HEADINGS, *(_row(table) for table in tables)])))
    else:
        sys.stdout.write("no tables: a client creates them, `shardam table import` brings one\n")
    return 0


def _all_tables(calls: ShardCalls) -> list[ClusterTable]:
    tables: list[ClusterTable] = []
    after = ""
    while True:
        page, after = list_tables(calls, after, PAGE_SIZE, REQUEST_ID)
        tables += page
        if not after:
            return tables


def _export(arguments: list[str]) -> int:
    about = ACTIONS["export"].about
    settings, name = parse_named("table export", TableExportSettings, arguments, about, "NAME")
    progress = make_row_progress(f"export of table {name}")
    with open_calls(settings, settings.shard_timeout_s) as calls, progress:
        exported = export_table(calls, name, settings.out, REQUEST_ID, progress.tell)
    sys.stdout.write(_exported_text(settings, name, exported))
    return 0


def _exported_text(settings: TableExportSettings, name: str, exported: Exported) -> str:
    if settings.as_json:
        value = {
            "table": name,
            "file": str(settings.out),
            "num_rows": exported.num_rows,
            "table_step": exported.info.table_step,
            "one_moment": exported.info.one_moment,
        }
        return f"{json.dumps(value)}\n"
    text = f"{settings.out}: {exported.num_rows} rows of table {name} at step {exported.info.table_step}\n"
    if not exported.info.one_moment:
        text += "note: the table was changed meanwhile, so rows are of different moments; a checkpoint is of one moment\n"
    return text


def _import(arguments: list[str]) -> int:
    about = ACTIONS["import"].about
    settings, path = parse_named("table import", TableImportSettings, arguments, about, "FILE")
    file = TableFile(path)
    terms = ImportTerms(settings.table, settings.overwrite, settings.weights_only)
    progress = make_row_progress(f"import of table {settings.table or file.spec.name}")
    with open_calls(settings, settings.shard_timeout_s) as calls, progress:
        imported = import_table(calls, file, terms, REQUEST_ID, progress.tell)
    sys.stdout.write(f"{json.dumps(imported.to_json())}\n" if settings.as_json else _imported_text(imported, file))
    return 0


def _imported_text(imported: Imported, file: TableFile) -> str:
    made = ", created" if imported.created else ""
    step = "moments begin anew" if imported.moments_reset else f"step {imported.table_step}"
    deleted = f", {imported.num_deleted} others deleted" if imported.num_deleted else ""
    lines = [f"table {imported.table}{made}: {imported.num_rows} rows written{deleted}, {step}"]
    if imported.other_seed:
        lines.append("note: rows that are not in the file start from other initial weights than where it was exported")
    if not imported.one_moment:
        lines.append("note: the file's rows are of different moments, because the table was changed while it was exported")
    if file.info.last_options is not None:
        lines.append(
            f"lr of the last push before the export: {spelled(file.info.last_options.lr)}; active: the next push's own"
        )
    return "".join(f"{line}\n" for line in lines)


def _to_json(table: ClusterTable) -> dict[str, object]:
    latest = table.latest
    return {
        "name": table.spec.name,
        "spec": spec_to_json(table.spec),
        "table_step": table.table_step,
        "num_rows": table.num_rows,
        "read_only": latest.read_only,
        "last_options": options_to_json(latest.last_options) if latest.HasField("last_options") else None,
        "missing_shards": list(table.missing_shards),
    }


def _row(table: ClusterTable) -> tuple[str, ...]:
    latest = table.latest
    lr = str(spelled(latest.last_options.lr)) if latest.HasField("last_options") else "-"
    rows = "unknown" if table.num_rows is None else str(table.num_rows)
    notes = ["read-only"] if latest.read_only else []
    notes += [f"no answer from shards {', '.join(map(str, table.missing_shards))}"] if table.missing_shards else []
    return (table.spec.name, rows, str(table.spec.dim), table.spec.dtype, str(table.table_step), lr, "; ".join(notes))


ACTIONS: dict[str, Action] = {
    "list": Action("Lists the cluster's tables.", "list", _list),
    "export": Action(
        "Writes a table with its moments and steps to a file (safetensors or npz).",
        "export items --out items.safetensors",
        _export,
    ),
    "import": Action(
        "Reads a table from such a FILE, creating it if need be.", "import items.safetensors --table items-copy", _import
    ),
}
"""Actions by name, in the order of the help."""
