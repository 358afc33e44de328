"""Errors as application/problem+json: status and reason from shardam_proto.errors, the one table."""

from __future__ import annotations

import dataclasses
import http
import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from shardam_proto.errors import REASONS, ShardamError, ShardNotReady
from shardam_server.admin.bodies import explain_content_type, explain_malformed, explain_unreadable
from shardam_server.admin.encoding import Json, JsonResponse

logger = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"

RETRY_AFTER_S = 1
"""What Retry-After says: a shard that starts or was replaced is seen within about a second."""

HTTP_ONLY_REASONS: Mapping[str, int] = {
    "UNKNOWN_ROUTE": 404,
    "METHOD_NOT_ALLOWED": 405,
    "UNKNOWN_SHARD": 404,
    "NOT_ACCEPTABLE": 406,
    "BAD_HOST": 403,
    "BAD_ORIGIN": 403,
}
"""Reasons of what exists on HTTP alone (paths, forms, hosts, ...), with their status; all others are in the one table."""

_REASON_OF_STATUS = {404: "UNKNOWN_ROUTE", 405: "METHOD_NOT_ALLOWED", 413: "MESSAGE_TOO_LARGE"}


class HttpOnlyError(Exception):
    """A request that is wrong in a way that only HTTP knows.

    Args:
        reason: a key of HTTP_ONLY_REASONS.
        detail: what was wrong, with which value, and what to do.
        metadata: the values of the detail, by name.
    """

    def __init__(self, reason: str, detail: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        self.metadata = dict(metadata or {})


class DetailedError(Exception):
    """A shardam error whose answer carries more than text (an UNKNOWN_ROW's initial weight).

    Args:
        error: the error.
        members: further members of the problem.
        headers: further headers.
    """

    def __init__(self, error: ShardamError, members: Mapping[str, Json], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.members = members
        self.headers = dict(headers or {})


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem before it is encoded.

    Attributes:
        status: HTTP status.
        reason: stable UPPER_SNAKE reason.
        detail: what was wrong, with which value, and what to do.
        members: further members; they never replace the standard ones.
        headers: further headers.
    """

    status: int
    reason: str
    detail: str
    members: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_response(self, request_id: str) -> JsonResponse:
        """Returns the response; `request_id` is repeated in it so that a log line can be found."""
        body: dict[str, Json] = {
            **self.members,
            "type": "about:blank",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "reason": self.reason,
            "request_id": request_id,
        }
        headers = dict(self.headers)
        if self.status in (429, 503) and self.reason in REASONS and REASONS[self.reason].retryable:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        return JsonResponse(body, self.status, headers, PROBLEM_TYPE)


def problem_of(
    error: ShardamError, members: Mapping[str, Json] | None = None, headers: Mapping[str, str] | None = None
) -> Problem:
    """Translates an error by the one table."""
    rule = REASONS.get(error.reason, REASONS["INTERNAL"])
    return Problem(rule.http_status, error.reason, error.message, {**error.metadata, **(members or {})}, headers or {})


def problem_of_body(message: str) -> Problem:
    """Returns the answer for a body that could not be read: 422, BAD_OPTION."""
    return Problem(422, "BAD_OPTION", message, {"errors": [{"field": "body", "in": "body", "message": message}]})


def problem_of_validation(errors: Sequence[Mapping[str, object]]) -> Problem:
    """Translates what FastAPI found wrong with a request: 422, BAD_OPTION, each field named."""
    if errors and errors[0].get("type") == "json_invalid":
        return problem_of_body(explain_malformed(errors[0]))
    fields: list[Json] = []
    texts = []
    for error in errors:
        location = error["loc"]
        assert isinstance(location, Sequence)
        where, *path = [str(part) for part in location]
        name = ".".join(path) or where
        message = str(error["msg"])
        fields.append({"field": name, "in": where, "message": message})
        texts.append(f"{name}: {message}")
    members: dict[str, Json] = {"errors": fields}
    return Problem(422, "BAD_OPTION", "; ".join(texts), members)


def internal_problem(request_id: str) -> Problem:
    """Returns the answer for an error nobody foresaw; the log has the rest under the request id."""
    return Problem(500, "INTERNAL", f"an unexpected error; the admin API's log has it under request id {request_id}")


def ending_problem() -> Problem:
    """Returns the answer for a request that was not there whole when the time to finish it was over."""
    return problem_of(ShardNotReady("the admin API ends; send the request to another one, or again once it has started"))


def install(app: FastAPI) -> None:
    """Makes every error of the app's routes a problem."""

    async def on_shardam_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, ShardamError)
        if error.reason not in REASONS or error.reason == "INTERNAL":
            logger.error("%s %s: %s", request.method, request.url.path, error.message)
        return problem_of(error).to_response(request.state.request_id)

    async def on_detailed_error(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, DetailedError)
        return problem_of(error.error, error.members, error.headers).to_response(request.state.request_id)

    async def on_http_only(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HttpOnlyError)
        problem = Problem(HTTP_ONLY_REASONS[error.reason], error.reason, error.detail, error.metadata)
        return problem.to_response(request.state.request_id)

    async def on_validation(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, RequestValidationError)
        if isinstance(error.body, bytes):  # JSON would have been decoded
            content_type = request.headers.get("content-type")
            return problem_of_body(explain_content_type(content_type)).to_response(request.state.request_id)
        return problem_of_validation(error.errors()).to_response(request.state.request_id)

    async def on_http_exception(request: Request, error: Exception) -> JsonResponse:
        assert isinstance(error, HTTPException)
        unreadable = explain_unreadable(error.__cause__)
        if unreadable is not None:
            return problem_of_body(unreadable).to_response(request.state.request_id)
        reason = _REASON_OF_STATUS.get(error.status_code, "BAD_OPTION")
        detail = f"{request.method} {request.url.path}: {error.detail}; /docs lists what there is"
        problem = Problem(error.status_code, reason, detail, headers=error.headers or {})
        return problem.to_response(request.state.request_id)

    app.add_exception_handler(ShardamError, on_shardam_error)
    app.add_exception_handler(DetailedError, on_detailed_error)
    app.add_exception_handler(HttpOnlyError, on_http_only)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http_exception)
