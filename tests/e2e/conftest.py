"""One `loraplex up --demo` on the real model, as `make up` runs it, for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, kill_leftovers


@pytest.fixture(scope="session")
def demo_fleet(session_folder: Path) -> Iterator[Fleet]:
    cache = Path(os.environ.get("LORAPLEX_CACHE_DIR") or "~/.cache/loraplex").expanduser()
    if not (cache / "models" / "smollm2-135m" / "config.json").is_file():
        # `make test` pulls it; in CI its absence is a failure, not a reason to skip.
        assert not os.environ.get("CI"), "run `make model` first"
        pytest.skip("needs the base model: make model")
    fleet = Fleet(session_folder / "demo", "--demo")
    try:
        fleet.start()
        yield fleet
    finally:
        kill_leftovers(fleet)
