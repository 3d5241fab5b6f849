"""`polar doctor` on the disk that holds the house's log."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from polar_common.cli.doctor import _disk


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "verdict"), [(500, "ok"), (90, "note"), (1, "fail")])
def test_a_disk_that_is_nearly_full_is_told(
    free: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1000 * 10**9, (1000 - free) * 10**9, free * 10**9))
    name, said, text = _disk(tmp_path)
    assert (name, said) == ("disk", verdict)
    assert text.startswith(f"{free}.0 of 1000.0 GB are free") and ("takes nothing" in text) == (verdict == "fail")
