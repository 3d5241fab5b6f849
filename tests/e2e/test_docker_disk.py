"""A whole house whose Docker attempts have disks of their own: who fills one is judged, and all of it goes with him."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dock_kit import HELLO, Dock, dock_house, ended, held, settled

import runtime_docker

pytestmark = [pytest.mark.docker, pytest.mark.nats, pytest.mark.chdb, pytest.mark.timeout(600)]

_OWN = b"of the image"


@pytest.fixture(scope="module")
def disks() -> Iterator[Dock]:
    with dock_house("POLAR_GATEWAY_DISK=loop") as made:
        yield made


_SLOW = pytest.mark.slow


@pytest.mark.parametrize("place", [".", pytest.param("$HOME", marks=_SLOW), pytest.param("/tmp", marks=_SLOW)])
def test_a_disk_filler_is_judged_and_leaves_nothing(disks: Dock, place: str) -> None:
    disks.works()
    before = held(disks)
    assert (before["loops"], before["attempts"]) == (0, [])
    fill = f"while cat /bin/busybox >> {place}/big; do :; done; sleep 2\n"
    row = disks.run(disks.task("filler", fill, runtime={"disk_mb": 32}))["filler"]
    attempt = ended(row)
    assert row["outcomes"] == {"failed": 1}, attempt
    assert (attempt["fault"], attempt["cause"]) == ("agent", "resource_exhausted")
    assert "disk" in attempt["detail"]
    assert settled(disks, before) == before
    disks.works()
    assert settled(disks, before) == before


def test_a_disk_holds_the_images_own_files(disks: Dock) -> None:
    image = runtime_docker.image_with(disks.host, "workspace/own.txt", _OWN)
    script = "grep -qx 'of the image' own.txt && grep -q ' /workspace ext4 ' /proc/mounts && echo hi > hello.txt\n"
    evaluator = {"kind": "command", "command": f"{HELLO} && test -s own.txt"}
    row = disks.run(disks.task("own", script, runtime={"image": image}, evaluator=evaluator))["own"]
    assert row["outcomes"] == {"passed": 1}, row["shown"]
    assert ended(row)["exit_code"] == 0


def test_an_image_that_doesnt_fit_is_told_once(disks: Dock) -> None:
    image = runtime_docker.image_with(disks.host, "workspace/large", bytes(40 << 20))
    row = disks.run(disks.task("large", "true", runtime={"image": image, "disk_mb": 32}), code=1)["large"]
    assert row["outcomes"] == {"harness_error": 1}
    assert "doesn't fit" in row["shown"]["detail"]
    assert len(row["shown"]["attempts"]) == 1
    disks.works()
