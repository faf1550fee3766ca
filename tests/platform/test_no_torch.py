"""No platform process loads torch: not by any module that it can reach."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "triton", "loraplex_kernels")

WALK = """
import importlib, pkgutil, sys
names = sys.argv[1].split(",")
for name in names:
    package = importlib.import_module(name)
    if hasattr(package, "__path__"):
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
print(",".join(sorted(name for name in sys.modules if "." not in name or name.endswith(".main"))))
"""


# The walk over the platform includes each of its processes.
@pytest.mark.parametrize(
    "packages", ["loraplex_platform", "loraplex_admin.api,loraplex_admin.views"]
)
def test_no_module_of_a_platform_process_imports_torch(packages: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WALK, packages],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.strip().splitlines()[-1].split(","))
    assert loaded & set(HEAVY) == set()
    assert packages.partition(".")[0] in loaded
    if packages == "loraplex_platform":
        assert {f"{packages}.{name}.main" for name in ("gateway", "control", "worker")} <= loaded
