"""Check one uploaded adapter, in a process of its own: `python -m loraplex_platform.registry.validate`.

Nothing of the platform is in this process: no database, no keys, a bare environment. Limits are set
after the imports and before the first byte of the upload is read. The verdict is one JSON line on
stdout; exit status 0 means there is one.
"""

from __future__ import annotations

import argparse
import errno
import json
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
from loraplex_engine.artifact import (
    AdapterLimits,
    ArtifactError,
    ModelShape,
    check_fits,
    estimate_memory,
    estimate_overhead,
    read_adapter,
)

_MAX_OPEN_FILES = 32


def set_limits(memory_bytes: int, cpu_s: int) -> None:
    """Bound this process for good: address space, CPU time, no files written, no core dump."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))


def check(folder: Path, base_config: Path, limits: AdapterLimits) -> dict[str, Any]:
    """The verdict: {"ok": true, facts...} or {"ok": false, "field", "message", "remedy"}."""
    shape = ModelShape.from_config_json(base_config)
    try:
        artifact = read_adapter(folder, limits=limits)
        fit = check_fits(artifact, shape, base=base_config.parent)
    except ArtifactError as error:
        return {
            "ok": False,
            "field": error.field,
            "message": error.message,
            "remedy": error.remedy,
        }
    except MemoryError:
        return _out_of_memory()
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return _out_of_memory()
    checks = [{"name": c.name, "ok": True, "detail": c.detail} for c in artifact.checks]
    checks.append(
        {
            "name": "base",
            "ok": True,
            "detail": f"fits {fit.matched_modules} of the base's {fit.total_modules} linear layers",
        }
    )
    return {
        "ok": True,
        "digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
        "rank": artifact.rank_max,
        "target_modules": list(artifact.target_modules),
        "parameters": artifact.num_parameters,
        "max_norm": artifact.norms.max,
        "matched_modules": fit.matched_modules,
        "total_modules": fit.total_modules,
        "checks": checks,
        "memory": msgspec.to_builtins(estimate_memory(artifact, shape, max_rank=limits.max_rank)),
        "overhead": msgspec.to_builtins(estimate_overhead(artifact, shape)),
    }


def _out_of_memory() -> dict[str, Any]:
    return {
        "ok": False,
        "field": "adapter_model",
        "message": "checking it needs more memory than is allowed.",
        "remedy": "Use a smaller rank or fewer target modules, or ask the operator to raise "
        "LORAPLEX_VALIDATION_MEMORY_BYTES.",
    }


def main(argv: list[str] | None = None) -> int:
    """Parse, limit, check, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--base-config", type=Path, required=True)
    parser.add_argument("--max-rank", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--cpu-s", type=int, required=True)
    arguments = parser.parse_args(argv)
    limits = AdapterLimits(max_rank=arguments.max_rank, max_model_bytes=arguments.max_bytes)
    set_limits(arguments.memory_bytes, arguments.cpu_s)
    verdict = check(arguments.folder, arguments.base_config, limits)
    sys.stdout.write(json.dumps(verdict) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
