"""docs/training.md names the phases that the program counts, and nothing that it does not have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import shardam
from shardam._cluster_timings import METRIC
from shardam._timings import PHASES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text(encoding="utf-8")


def test_every_phase_has_its_line_in_the_order_in_which_timings_shows_them() -> None:
    table = PAGE.split("## Prefetch")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE) == list(PHASES)
    for phase in PHASES:
        assert phase in (inspect.getdoc(shardam.Cluster.timings) or "")


def test_the_metric_and_the_defaults_of_prefetch_are_the_programs() -> None:
    assert f"`{METRIC}{{cluster, phase}}`" in PAGE
    parameters = inspect.signature(shardam.prefetch).parameters
    assert (parameters["depth"].default, parameters["exact"].default) == (1, False)
    assert "`exact=False` (default)" in PAGE
