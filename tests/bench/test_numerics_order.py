"""What measures the engine in its own process has its settings: they count only before numpy and torch are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["roofline", "loading", "prefix", "speculation"])
def test_nothing_is_loaded_before_the_settings(module: str) -> None:
    code = (
        f"import sys, bench.{module} as module\n"
        "assert module.prepare_numerics\n"
        "print(sorted({'numpy', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
