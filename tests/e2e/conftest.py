"""The houses that end-to-end tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from dock_kit import Dock, dock_house
from house_kit import Live, running_house


@pytest.fixture(scope="session")
def scripted_house() -> Iterator[Live]:
    """A house with the scripted engine, shared by the tests of a session."""
    with tempfile.TemporaryDirectory(prefix="polar-e2e-") as directory:
        data = Path(directory) / "house"
        with running_house(data, "--model", "tiny", "--setting", "POLAR_ENGINE_SCRIPT=file") as live:
            yield live


@pytest.fixture(scope="module")
def dock() -> Iterator[Dock]:
    """A house with Docker, shared by the tests of a module."""
    with dock_house() as made:
        yield made
