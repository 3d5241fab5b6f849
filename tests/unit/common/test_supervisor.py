"""How long `polar up` waits before it starts again what has died."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from polar_common.house.supervisor import Child, Supervisor
from polar_common.house.up import ENGINE_KINDS
from polar_proxy.settings import ProxySettings


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_path, {})
    yield made
    made.stop()


def test_the_kinds_of_engines_are_those_of_the_proxy() -> None:
    assert set(ENGINE_KINDS) == set(get_args(ProxySettings.model_fields["proxy_engine_kind"].annotation))


def delays(supervisor: Supervisor, child: Child, times: int, kill: Callable[[Child], None]) -> list[float]:
    """The waits that are told as a child ends again and again; they are not sat through."""
    found: list[float] = []
    deadline = time.monotonic() + 20
    while len(found) < times:
        assert time.monotonic() < deadline
        lines = list(supervisor.watch())
        if child.alive:
            lines += supervisor.watch()
            kill(child)
        for line in lines:
            if "again in" in line:
                found.append(float(line.split()[-2]))
                child.restart_at = time.monotonic()
        time.sleep(0.01)
    return found


def end(child: Child) -> None:
    assert child.process is not None
    child.process.kill()
    child.process.wait()


def test_what_is_killed_over_and_over_is_back_within_a_second(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.start(Child("part", ["/bin/sleep", "100"], tmp_path / "log", ready=lambda: True))
    assert delays(supervisor, child, 5, end) == [0.2, 1.0, 1.0, 1.0, 1.0]


def test_what_never_comes_up_is_tried_less_and_less_often(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.spawn(Child("part", ["/bin/sleep", "100"], tmp_path / "log", ready=lambda: False))
    assert delays(supervisor, child, 5, end) == [0.2, 1.0, 3.0, 10.0, 10.0]


def test_what_fails_by_itself_is_tried_less_and_less_often(supervisor: Supervisor, tmp_path: Path) -> None:
    child = supervisor.spawn(Child("part", ["/bin/sh", "-c", "exit 1"], tmp_path / "log", ready=lambda: True))
    assert delays(supervisor, child, 5, lambda one: None) == [0.2, 1.0, 3.0, 10.0, 10.0]
