"""Settings of `shardam checkpoint ACTION`: one class per action (settings.py says how they become flags)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, AliasChoices, Field

from shardam_proto.errors import InvalidArgument
from shardam_proto.schema import check_name
from shardam_server.setting_types import TimeoutSeconds
from shardam_server.settings import MemberSettings


def _check_checkpoint(name: str) -> str:
    try:
        return check_name(name, "checkpoint name")
    except InvalidArgument as error:
        raise ValueError(error.message) from error


def _check_tables(names: str) -> str:
    try:
        for name in names.split(","):
            check_name(name)
    except InvalidArgument as error:
        raise ValueError(error.message) from error
    return names


class CheckpointSettings(MemberSettings):
    """Settings of every action.

    Attributes:
        as_json: `--json`.
    """

    shard_timeout_s: TimeoutSeconds = Field(60.0, description="seconds until a call to a shard has failed")
    as_json: bool = Field(
        False, validation_alias=AliasChoices("SHARDAM_JSON"), description="print one JSON object instead of text"
    )


class CheckpointCreateSettings(CheckpointSettings):
    """Settings of `shardam checkpoint create`."""

    name: Annotated[str, AfterValidator(_check_checkpoint)] | None = Field(
        None,
        validation_alias=AliasChoices("SHARDAM_CHECKPOINT_NAME"),
        description="name of the checkpoint, up to 128 of A-Z a-z 0-9 _ . -; named ones stay whatever "
        "--checkpoint-keep says. Without it the time and a number",
    )
    wait: bool = Field(True, description="wait until all of it is written; without, return once the state is cut")


class CheckpointVerifySettings(CheckpointSettings):
    """Settings of `shardam checkpoint verify`."""

    wait: bool = Field(True, description="wait until all files are read; without, return at once")


class CheckpointRestoreSettings(CheckpointSettings):
    """Settings of `shardam checkpoint restore`."""

    tables: Annotated[str, AfterValidator(_check_tables)] | None = Field(
        None, description="load these tables alone, by name with commas between; the cluster's others stay"
    )
    allow_missing_tables: bool = Field(
        False, description="leave tables as they are that the checkpoint lacks; else they are a reason to refuse"
    )
    allow_unexpected_tables: bool = Field(
        False, description="create and load tables that the cluster lacks; else they are a reason to refuse"
    )
    weights_only: bool = Field(False, description="load weights alone: moments and steps begin anew")
    read_only: bool = Field(False, description="load for reading alone: the tables refuse pushes and changes of rows")
    accept_arithmetic_change: bool = Field(
        False, description="load a checkpoint of an older arithmetic version; steps may then come out with other bits"
    )
    wait: bool = Field(True, description="wait until the cluster has gone on from it; without, return at once")
    yes: bool = Field(False, description="do not ask before the cluster's state is replaced")

    @property
    def table_names(self) -> list[str]:
        """The tables to load; empty: all."""
        return self.tables.split(",") if self.tables else []


class CheckpointDeleteSettings(CheckpointSettings):
    """Settings of `shardam checkpoint delete`."""

    yes: bool = Field(False, description="do not ask before the checkpoint is deleted")
