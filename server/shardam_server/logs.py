"""Log lines: one event, one line, as text or JSON, with the fields that say who speaks; never a secret.

Only a process's entry configures logging; modules use `logging.getLogger(__name__)`. INFO is for changes of state; what every
request does is a metric.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from urllib.parse import unquote

from shardam_server.settings import CommonSettings

Field = str | int | float | bool | None

_request_id: contextvars.ContextVar[int | str | None] = contextvars.ContextVar("request_id", default=None)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_HIDDEN = "***"


@contextlib.contextmanager
def log_request(request_id: int | str) -> Iterator[None]:
    """Adds the request id to every line that is logged inside, also by awaited calls."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def configure_logging(settings: CommonSettings, **fields: Field) -> None:
    """Sends all logs of the process to stderr in the form that the settings ask for.

    Args:
        settings: level, form, cluster, and the secrets that no line may show.
        **fields: who speaks: `shard` or `role`, `incarnation`. A later call replaces them.
    """
    formatter = LineFormatter(settings.log_format, {"cluster": settings.cluster, **fields}, secrets_of(settings))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_death


def secrets_of(settings: CommonSettings) -> list[str]:
    """Returns the texts of the settings that must not be shown: the token and the password of the Redis URL."""
    secrets = [settings.plain_token]
    url: str | None = getattr(settings, "redis", None)
    if url is not None:
        credentials, at, _ = url.partition("://")[2].rpartition("@")
        password = credentials.partition(":")[2]
        if at and password:
            secrets += [password, unquote(password)]
    return [secret for secret in secrets if secret]


class LineFormatter(logging.Formatter):
    """Formats a record as one line.

    Args:
        form: "text" or "json".
        fields: fields of every line.
        secrets: texts that are replaced wherever they would show.
    """

    def __init__(self, form: str, fields: Mapping[str, Field], secrets: list[str]) -> None:
        super().__init__()
        self._form = form
        self._fields = dict(fields)
        self._secrets = sorted(secrets, key=len, reverse=True)  # a secret may hold a shorter one

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without a line break."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields = {**self._fields, **self._extra_fields(record)}
        message = record.getMessage()
        if self._form == "json":
            event = {"time": time, "level": record.levelname.lower(), "logger": record.name, "message": message, **fields}
            return self._hide(json.dumps(event, default=str))
        shown = " ".join(f"{name}={_text_value(value)}" for name, value in fields.items())
        return self._hide(f"{time} {record.levelname} {record.name}: {_one_line(message)} [{shown}]")

    def _extra_fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Returns the request id, what the caller gave as `extra`, and the traceback if there is one."""
        fields: dict[str, object] = {}
        request_id = _request_id.get()
        if request_id is not None:
            fields["request_id"] = request_id
        fields.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception"] = self.formatException(record.exc_info)
        return fields

    def _hide(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n") if "\n" in text or "\r" in text else text


def _text_value(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(character in text for character in ' "\n\r]') else text


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("the process ends: %s", error, exc_info=(kind, error, trace))


def _log_thread_death(arguments: threading.ExceptHookArgs) -> None:
    error = arguments.exc_value or arguments.exc_type()
    name = arguments.thread.name if arguments.thread else "unknown"
    logging.getLogger(__name__).critical(
        "thread %s ends: %s", name, error, exc_info=(arguments.exc_type, error, arguments.exc_traceback)
    )
