"""Which device a shard gets."""

from __future__ import annotations

import pytest

from shardam_server import devices
from shardam_server.command_errors import UsageError
from shardam_server.devices import VisibleGpus, check_device_name, choose_device, visible_gpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: request.param)


@pytest.mark.parametrize("gpus", [VisibleGpus(0, "no CUDA driver is installed")], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_without_a_gpu_auto_takes_the_cpu_and_says_why() -> None:
    choice = choose_device("auto", 0)
    assert choice.name == "cpu"
    assert "no CUDA driver is installed" in choice.reason


@pytest.mark.parametrize("gpus", [VisibleGpus(2)], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_auto_spreads_shards_over_the_gpus() -> None:
    assert [choose_device("auto", index).name for index in range(5)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.case("C137")
@pytest.mark.case("C143")
@pytest.mark.parametrize(
    ("gpus", "message"),
    [(VisibleGpus(0, "no CUDA driver is installed"), "no CUDA driver is installed"), (VisibleGpus(1), "only 1 GPU is present")],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_a_named_gpu_that_is_not_there_is_refused_and_never_replaced(message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_device("cuda:7", 0)


@pytest.mark.parametrize("gpus", [VisibleGpus(2)], indirect=True)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["cpu", "cuda:1", "interpret"])
def test_a_named_device_is_taken_as_it_is(name: str) -> None:
    assert choose_device(name, 5).name == name


def test_the_interpreter_is_never_chosen_by_auto() -> None:
    assert choose_device("auto", 0).name != "interpret"


@pytest.mark.parametrize("name", ["cuda", "gpu", "cuda:-1", "cuda:x", "CPU", "", "mps"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="use auto"):
        check_device_name(name)


def test_asking_the_driver_gives_a_count_or_the_reason_for_none() -> None:
    gpus = visible_gpus()
    assert gpus.count > 0 or gpus.why_none
