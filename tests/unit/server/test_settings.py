from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shardam_server.settings import AdminSettings, CommonSettings, ShardSettings, StateSettings, StatusSettings, UpSettings

REDIS = "redis://127.0.0.1:6379/0"


def make_shard(**values: object) -> ShardSettings:
    return ShardSettings.model_validate({"index": 0, "shards": 2, "redis": REDIS, **values})


def test_a_value_given_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_shard().bound_port == 7070
    monkeypatch.setenv("SHARDAM_PORT", "7171")
    assert make_shard().bound_port == 7171
    assert make_shard(port="7272").bound_port == 7272


def test_shards_on_one_machine_have_ports_of_their_own_by_default() -> None:
    assert [make_shard(index=str(index), shards="3").bound_port for index in range(3)] == [7070, 7071, 7072]
    assert make_shard(index="1", shards="3", port="0").bound_port == 0


def test_an_empty_environment_value_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_PORT", "")
    monkeypatch.setenv("SHARDAM_TOKEN", "")
    assert make_shard().bound_port == 7070
    assert make_shard().token is None


@pytest.mark.parametrize("name", ["SHARDAM_REDIS", "SHARDAM_REDIS_URL"])
def test_members_find_redis_under_both_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, REDIS)
    assert AdminSettings.model_validate({}).redis == REDIS
    assert StatusSettings.model_validate({"redis": "redis://other:1"}).redis == "redis://other:1"


def test_up_does_not_take_the_workers_url_for_its_own_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_REDIS_URL", REDIS)
    assert UpSettings.model_validate({}).redis is None
    monkeypatch.setenv("SHARDAM_REDIS", REDIS)
    assert UpSettings.model_validate({}).redis == REDIS


def test_neither_token_nor_redis_password_shows_in_the_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_TOKEN", "t0ken-value")
    settings = make_shard(redis="redis://:pa55word@host:6379/0")
    assert settings.plain_token == "t0ken-value"
    for shown in (repr(settings), str(settings)):
        assert "t0ken-value" not in shown
        assert "pa55word" not in shown


def test_a_token_file_gives_the_token_without_its_line_break(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc-123\n", encoding="utf-8")
    assert make_shard(token_file=str(path)).plain_token == "abc-123"


@pytest.mark.parametrize(("content", "problem"), [("", "visible ASCII"), ("two words", "visible"), (None, "cannot be read")])
def test_an_unusable_token_file_is_refused_with_its_path(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValidationError, match=problem) as caught:
        make_shard(token_file=str(path))
    assert str(path) in str(caught.value)


def test_a_token_from_two_places_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARDAM_TOKEN", "one")
    path = tmp_path / "token"
    path.write_text("two", encoding="utf-8")
    with pytest.raises(ValidationError, match="keep one"):
        make_shard(token_file=str(path))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_shard().port = 1


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("port", [0, 65_535], [-1, 65_536, "70.5", "x"]),
        ("seed", [0, 2**64 - 1], [-1, 2**64]),
        ("max_rows", [0, 2**63 - 1], [-1]),
        ("threads", [1, 256], [0, 257]),
        ("lease_s", [0.1, 300], [0.09, 301, "nan"]),
        ("redis_timeout_s", [0.1], [0, -1, "inf"]),
        ("cluster", ["a.b-c_1", "A" * 128], ["", "a/b", "../x", "ü", "A" * 129]),
        ("advertise", ["host:7070", "[::1]:1"], ["host", ":7070", "host:0", "host:70000", "host:x"]),
        ("redis", ["redis://h", "rediss://h", "unix:///s"], ["http://h", "localhost:6379", "redis://h:port"]),
        ("host", ["0.0.0.0", "::"], ["", "a b"]),
        ("log_level", ["info", "DEBUG"], ["loud"]),
        ("log_format", ["text", "JSON"], ["yaml"]),
        ("insecure", [True, "1", "false"], ["perhaps"]),
    ],
)
def test_bounds_of_a_field(field: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        make_shard(**{field: value})
    for value in bad:
        with pytest.raises(ValidationError):
            make_shard(**{field: value})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:0", "interpret"])
def test_devices_are_taken_by_name(device: str) -> None:
    assert make_shard(device=device).device == device


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown device"):
        UpSettings.model_validate({"device": "tpu"})


def test_an_index_outside_the_shards_is_refused_with_both_flags() -> None:
    with pytest.raises(ValidationError, match="--index 2 needs --shards 3 or more, got --shards 2"):
        make_shard(index=2)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"port": 65_535, "shards": 2}, "needs ports up to 65536"),
        ({"port": 8079, "shards": 2}, "--admin-port 8080 is a shard's port"),
        ({"restart_delay_s": 5, "restart_delay_max_s": 1}, "--restart-delay-max-s 1 is less than --restart-delay-s 5"),
    ],
)
def test_up_refuses_flags_that_contradict_each_other(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        UpSettings.model_validate(values)


@pytest.mark.parametrize(
    ("state_home", "folder"), [("/var/state", "/var/state/shardam"), ("", None), ("not/absolute", None)], ids=str
)
def test_up_keeps_rows_in_the_users_state_folder_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state_home: str, folder: str | None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", state_home)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".local" / "state" / "shardam" if folder is None else Path(folder)
    settings = UpSettings.model_validate({})
    assert (settings.data_dir, settings.journal_mode) == (expected, "write")
    assert make_shard().data_dir is None, "a shard by itself keeps nothing unless it is told where"


@pytest.mark.parametrize("source", ["flag", "environment"])
@pytest.mark.parametrize("text", ["none", "None"])
def test_none_is_memory_only_without_a_journal(monkeypatch: pytest.MonkeyPatch, source: str, text: str) -> None:
    if source == "environment":
        monkeypatch.setenv("SHARDAM_DATA_DIR", text)
    settings = UpSettings.model_validate({"data_dir": text} if source == "flag" else {})
    assert (settings.data_dir, settings.journal_mode) == (None, "off")


def test_the_folder_of_up_is_absolute_and_the_home_folder_may_be_spelled_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    assert UpSettings.model_validate({"data_dir": "rows/../state"}).data_dir == tmp_path / "state"
    assert UpSettings.model_validate({"data_dir": "~/state"}).data_dir == Path("/home/someone/state")
    with pytest.raises(ValidationError, match="no home folder; name a folder with --data-dir PATH"):
        UpSettings.model_validate({"data_dir": "~nobody-of-this-name/state"})


def test_an_empty_folder_name_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be a folder, or none for memory only"):
        UpSettings.model_validate({"data_dir": ""})


@pytest.mark.parametrize("journal", ["write", "fsync"])
def test_a_journal_without_a_folder_is_refused_with_the_flag(journal: str) -> None:
    with pytest.raises(ValidationError, match=f"--journal {journal} needs --data-dir"):
        UpSettings.model_validate({"data_dir": "none", "journal": journal})


IGNORED = {"on_journal_full": "refuse", "journal_limit_mib": "9", "truncate_journal": "true"}
"""Settings of a journal, each with a value that would do nothing without a folder."""


@pytest.mark.parametrize("source", ["flag", "environment"])
@pytest.mark.parametrize("field", IGNORED)
def test_what_would_do_nothing_without_a_folder_is_refused_with_its_names(
    monkeypatch: pytest.MonkeyPatch, field: str, source: str
) -> None:
    given = {field: IGNORED[field]}
    if source == "environment":
        monkeypatch.setenv(f"SHARDAM_{field.upper()}", given.pop(field))
    flag = "--" + field.replace("_", "-")
    message = rf"without --data-dir there is no journal, so {flag} \(SHARDAM_{field.upper()}\) would do nothing: name a folder"
    with pytest.raises(ValidationError, match=message):
        make_shard(**given)
    with pytest.raises(ValidationError, match=message):
        UpSettings.model_validate({"data_dir": "none", **given})
    UpSettings.model_validate(given)
    make_shard(data_dir="/rows", **given)


def test_what_changes_nothing_is_taken_without_a_folder() -> None:
    assert not make_shard(truncate_journal="false").truncate_journal
    with pytest.raises(ValidationError, match=r"--on-journal-full .* and --journal-limit-mib .* would do nothing"):
        make_shard(on_journal_full="suspend", journal_limit_mib="1024")


def test_up_takes_every_setting_of_a_shards_state() -> None:
    of_state = set(StateSettings.model_fields) - set(CommonSettings.model_fields)
    assert of_state <= set(UpSettings.model_fields)
    assert of_state <= set(ShardSettings.model_fields)
