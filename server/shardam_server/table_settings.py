"""Settings of `shardam table ACTION`: one class per action (settings.py says how they become flags)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field

from shardam_proto.errors import InvalidArgument
from shardam_proto.schema import check_name
from shardam_server.setting_types import TimeoutSeconds
from shardam_server.settings import MemberSettings


def _check_table(name: str) -> str:
    try:
        return check_name(name)
    except InvalidArgument as error:
        raise ValueError(error.message) from error


class TableSettings(MemberSettings):
    """Settings of every action.

    Attributes:
        as_json: `--json`.
    """

    shard_timeout_s: TimeoutSeconds = Field(60.0, description="seconds until a call to a shard has failed")
    as_json: bool = Field(
        False, validation_alias=AliasChoices("SHARDAM_JSON"), description="print one JSON object instead of text"
    )


class TableExportSettings(TableSettings):
    """Settings of `shardam table export`."""

    out: Path = Field(description="the file, ending in .safetensors or .npz; one that is there is replaced. Required")


class TableImportSettings(TableSettings):
    """Settings of `shardam table import`."""

    table: Annotated[str, AfterValidator(_check_table)] | None = Field(
        None, description="name of the table in the cluster; without it the name that it had when it was exported"
    )
    overwrite: bool = Field(
        False, description="a table that has rows or steps becomes what the file says; rows that are not in it are deleted"
    )
    weights_only: bool = Field(False, description="read weights alone: moments begin anew, and the table's step stays")
