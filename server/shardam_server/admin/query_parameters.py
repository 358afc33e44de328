"""Query parameters: one that a route does not know, or that is given twice, is refused, so that none is ignored."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute


async def check_query_parameters(request: Request) -> None:
    """Compares what the request has with what its route declares; a dependency of routers.

    Raises:
        RequestValidationError: a parameter is unknown or repeated; each is named with those that the route takes.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = list(_declared(route.dependant))
    takes = f"known are {', '.join(known)}" if known else "this route takes none"
    given = [name for name, _ in request.query_params.multi_items()]
    errors: list[dict[str, object]] = []
    for name in dict.fromkeys(given):
        if name not in known:
            errors.append({"loc": ("query", name), "msg": f"is no query parameter here; {takes}"})
        elif given.count(name) > 1:
            errors.append({"loc": ("query", name), "msg": f"is given {given.count(name)} times; give it once ({takes})"})
    if errors:
        raise RequestValidationError(errors)


def _declared(dependant: Dependant) -> Iterator[str]:
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _declared(inner)
