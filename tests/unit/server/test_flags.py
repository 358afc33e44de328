from __future__ import annotations

import pytest

from shardam_server.checkpoint_settings import CheckpointCreateSettings, CheckpointRestoreSettings
from shardam_server.command_errors import UsageError
from shardam_server.flags import flag_of, parse_settings, variables_of
from shardam_server.settings import AdminSettings, CommonSettings, ShardSettings, StatusSettings, UpSettings
from shardam_server.table_settings import TableExportSettings, TableImportSettings

CLASSES: dict[str, type[CommonSettings]] = {
    "up": UpSettings,
    "shard": ShardSettings,
    "admin": AdminSettings,
    "status": StatusSettings,
    "checkpoint create": CheckpointCreateSettings,
    "checkpoint restore": CheckpointRestoreSettings,
    "table export": TableExportSettings,
    "table import": TableImportSettings,
}


def refusal(command: str, *arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_settings(command, CLASSES[command], arguments, "About.")
    return str(caught.value)


@pytest.mark.parametrize("command", CLASSES)
def test_help_shows_every_flag_with_its_environment_name_and_default(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(command, CLASSES[command], ["--help"], "What it is for.")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "What it is for." in text
    for field, info in CLASSES[command].model_fields.items():
        for variable in variables_of(field, info):
            assert variable in text
        if field == "token":
            assert "--token " not in text
            continue
        assert flag_of(field) in text
        assert info.description
        assert info.description in text
        if isinstance(info.default, int | float | str) and not isinstance(info.default, bool):
            assert f"default {info.default}".removesuffix(".0") in text


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_PORT", "7171")
    monkeypatch.setenv("SHARDAM_INSECURE", "1")
    assert parse_settings("up", UpSettings, [], "").port == 7171
    settings = parse_settings("up", UpSettings, ["--port", "7272", "--no-insecure", "--json"], "")
    assert (settings.port, settings.insecure, settings.as_json) == (7272, False, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--admin-prt", "1"], "unknown flag --admin-prt (did you mean --admin-port?); see shardam up --help"),
        (["--drain", "1"], "unknown flag --drain (did you mean --drain-s?); see shardam up --help"),
        (["--xyzzy=1"], "unknown flag --xyzzy; see shardam up --help"),
        (["more"], "unexpected argument 'more'; `shardam up` takes flags only, see shardam up --help"),
        (["--port"], "argument --port: expected one argument; see shardam up --help"),
        (["--port", "70000"], "--port '70000': must be less than or equal to 65535"),
        (["--port", "x"], "--port 'x': must be a valid integer, unable to parse string as an integer"),
        (["--log-format", "yaml"], "--log-format 'yaml': must be 'text' or 'json'"),
        (["--device", "cuda"], "--device 'cuda': name the GPU, as in cuda:0; or use auto"),
        (["--port", "65535"], "--port 65535 with --shards 2 needs ports up to 65536; the last port is 65535"),
    ],
)
def test_a_wrong_flag_is_refused_with_value_and_remedy(arguments: list[str], message: str) -> None:
    assert refusal("up", *arguments) == message


def test_an_abbreviated_flag_is_refused() -> None:
    assert "unknown flag --admin-p " in refusal("up", "--admin-p", "1")


def test_the_token_is_no_flag() -> None:
    assert "SHARDAM_TOKEN or --token-file" in refusal("shard", "--token", "abc")


def test_a_wrong_environment_value_is_refused_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_PORT", "x")
    assert refusal("up").startswith("SHARDAM_PORT 'x': ")


def test_all_required_flags_are_named_at_once() -> None:
    message = refusal("shard")
    for flag in ("--redis is required (or SHARDAM_REDIS or SHARDAM_REDIS_URL)", "--index is required", "--shards is required"):
        assert flag in message


def test_a_refused_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hunter2" not in refusal("status", "--redis", "http://:hunter2@host")
    monkeypatch.setenv("SHARDAM_TOKEN", "open sesame")
    assert refusal("up") == "SHARDAM_TOKEN: a token is one or more visible ASCII characters without spaces"
