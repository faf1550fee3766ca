"""Folders with short names for tests: unix socket paths end at 107 bytes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import is_alive

_NAME = re.compile(r"lpx-(\d+)-\w+")


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A new one, deleted at the end. If we are killed before, the next `delete_leftovers` does it."""
    folder = Path(tempfile.mkdtemp(prefix=f"lpx-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def delete_leftovers(*, min_age_s: float = 3600.0) -> None:
    """Delete what processes that are gone have left; their servers ended with them.

    Args:
        min_age_s: younger folders stay: somebody may live where we see no processes, and share the disk.
    """
    for path in Path(tempfile.gettempdir()).glob("lpx-*"):
        name = _NAME.fullmatch(path.name)
        if name is None or is_alive(int(name[1])):
            continue
        with contextlib.suppress(FileNotFoundError):  # somebody else does it, too
            if time.time() - path.stat().st_mtime >= min_age_s:
                shutil.rmtree(path, ignore_errors=True)
