from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from shardam_server.logs import LineFormatter, log_request, secrets_of
from shardam_server.settings import ShardSettings

FIELDS: dict[str, str | int | float | bool | None] = {"cluster": "prod", "shard": 1, "incarnation": 7}


def make_record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("shardam_server.x", logging.INFO, __file__, 1, message, arguments, None)
    vars(record).update(extra)
    return record


def test_a_text_line_says_who_speaks() -> None:
    line = LineFormatter("text", FIELDS, []).format(make_record("serves at %s", "h:1"))
    assert line.endswith(" INFO shardam_server.x: serves at h:1 [cluster=prod shard=1 incarnation=7]")


def test_a_json_line_is_one_object_with_the_fields() -> None:
    event = json.loads(LineFormatter("json", FIELDS, []).format(make_record("serves", rows=3)))
    assert event.pop("time").endswith("+00:00")
    assert event == {"level": "info", "logger": "shardam_server.x", "message": "serves", "rows": 3, **FIELDS}


@pytest.mark.parametrize("form", ["text", "json"])
def test_one_event_is_one_line_even_with_a_traceback(form: str) -> None:
    record = make_record("first\nsecond\r\nthird")
    try:
        raise ValueError("broken\nmessage")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = LineFormatter(form, FIELDS, []).format(record)
    assert len(line.splitlines()) == 1
    for text in ("first", "third", "ValueError: broken", "test_logs.py"):
        assert text in line


def test_the_request_id_is_on_every_line_inside_and_on_none_after() -> None:
    formatter = LineFormatter("json", {}, [])
    with log_request(41):
        assert json.loads(formatter.format(make_record("x")))["request_id"] == 41
    assert "request_id" not in json.loads(formatter.format(make_record("x")))
    assert json.loads(formatter.format(make_record("x", request_id=42)))["request_id"] == 42


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_secret_shows_in_message_fields_or_traceback(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDAM_TOKEN", "t0ken")
    settings = ShardSettings.model_validate({"index": 0, "shards": 1, "redis": "redis://me:p%40ss@host:1/0"})
    assert sorted(secrets_of(settings)) == ["p%40ss", "p@ss", "t0ken"]
    record = make_record("Bearer %s at %s", "t0ken", settings.redis, field="p@ss")
    try:
        raise ValueError("t0ken")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = LineFormatter(form, {}, secrets_of(settings)).format(record)
    for secret in secrets_of(settings):
        assert secret not in line
    assert "redis://me:***@host:1/0" in line


PROGRAM = """
import logging, threading, warnings
from shardam_server.logs import configure_logging
from shardam_server.settings import UpSettings
configure_logging(UpSettings.model_validate({"log_format": "json", "log_level": "INFO"}), role="test")
logging.getLogger("a").debug("not shown")
logging.getLogger("a").info("shown")
warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
thread = threading.Thread(target=lambda: 1 // 0, name="worker")
thread.start(); thread.join()
raise RuntimeError("unforeseen")
"""


def test_a_process_logs_to_stderr_and_also_its_own_end() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [event["level"] for event in events] == ["info", "warning", "critical", "critical"]
    assert all((event["cluster"], event["role"]) == ("default", "test") for event in events)
    assert events[0]["message"] == "shown"
    assert "deprecated" in events[1]["message"]
    assert events[2]["message"].startswith("thread worker ends: ")
    assert events[3]["message"] == "the process ends: unforeseen"
    assert "RuntimeError: unforeseen" in events[3]["exception"]
