"""A fleet of real processes on a tiny random model, shared by the tests that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_fleet
from tests.support.fleet import Fleet, kill_leftovers
from tests.support.tiny_fleet import Customer


@pytest.fixture(scope="session")
def tiny_model(session_folder: Path) -> Path:
    return tiny_fleet.write_model(session_folder)


@pytest.fixture(scope="module")
def fleet(
    session_folder: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    # A folder of its own: what one module's fleet has written and said is not the next one's.
    name = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    fleet = Fleet(session_folder / name, "--model", str(tiny_model))
    try:
        fleet.start()
        yield fleet
    finally:
        kill_leftovers(fleet)


@pytest.fixture(scope="module")
def customers(
    fleet: Fleet, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Customer]:
    adapters = tiny_fleet.write_adapters(tmp_path_factory.mktemp("adapters"), tiny_model)
    with fleet.admin() as admin:
        return tiny_fleet.seed(admin, adapters)
