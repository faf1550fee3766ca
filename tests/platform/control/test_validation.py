"""The process that checks an upload is nobody's to leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import is_alive, wait_until

CHECKING = """
import asyncio, sys
from pathlib import Path
from loraplex_platform.registry.validation import Validator

folder = Path(sys.argv[1])
validator = Validator(
    folder / "config.json", max_rank=8, max_bytes=2**20, memory_bytes=2**32, timeout_s=1000.0)
asyncio.run(validator.check(folder))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_killed_control_api_takes_its_checks_with_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # a base model that takes forever to read
    control = subprocess.Popen([sys.executable, "-c", CHECKING, str(tmp_path)])
    children: list[psutil.Process] = []

    def is_checking() -> bool:
        children[:] = psutil.Process(control.pid).children()
        return any("loraplex_platform.registry.validate" in c.cmdline() for c in children)

    try:
        wait_until(is_checking)
        assert control.poll() is None
        [child] = children

        control.kill()
        control.wait()

        wait_until(lambda: not is_alive(child.pid))
    finally:
        control.kill()
        control.wait()
        for left in children:
            if is_alive(left.pid):
                left.kill()
