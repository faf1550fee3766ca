"""The command: starts each part in a process of its own and puts the figures together."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# From a checkout nothing need be installed but the wheels of deploy/gpu-requirements.txt.
for _folder in (_ROOT / "kernels", _ROOT / "engine", _ROOT):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from bench.gpu_check.command import main  # noqa: E402 -- the path comes first

if __name__ == "__main__":
    sys.exit(main())
