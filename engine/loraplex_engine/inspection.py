"""What this machine offers an engine: `python -m loraplex_engine.inspection` prints it as JSON.

For `loraplex doctor`, which loads no torch itself. Kernels are compiled into the cache that an engine uses, so that
a second look, and the engine's own start, are quick. With `--model-dir` the model is loaded too and the row rule is
tried as an engine tries it at its start; that takes as long as such a start.

Exit code: 0, whatever was found; 1 where torch itself cannot be imported, which is said in the JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loraplex_engine.numerics_environment import prepare_numerics

# What an engine on a CPU loads, see `model/`, `attention/`, `lora/` and `sampling/`.
KERNELS = ("attention", "cut", "gumbel", "layers", "linear", "lora", "ops", "quantize", "scan")


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_engine.inspection")
    parser.add_argument("--model-dir", type=Path, help="also load this model and try the row rule")
    values = parser.parse_args(arguments)
    prepare_numerics()
    found: dict[str, Any] = {"python": platform.python_version()}
    try:
        import torch  # noqa: F401 - whether it can be
    except (ImportError, OSError) as error:
        found["torch_error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(found))  # noqa: T201 - what it is for
        return 1
    _send_logs_to_stderr()
    found |= _look()
    if values.model_dir is not None:
        found["row_rule"] = _try_row_rule(values.model_dir)
    print(json.dumps(found))  # noqa: T201 - what it is for
    return 0


def _look() -> dict[str, Any]:
    import torch

    from loraplex_engine.convert import cache_dir
    from loraplex_engine.device.selection import select_device
    from loraplex_engine.errors import ConfigError
    from loraplex_engine.model.loading import resolve_dtype
    from loraplex_engine.threads import usable_cpus

    try:
        device = select_device("auto")
        gpu = {"name": device.name, "isa": device.isa} if device.is_cuda else None
        gpu_error = None
    except ConfigError as error:
        gpu, gpu_error = None, str(error)
    cache = cache_dir()
    built, failed = [], {}
    for name in KERNELS:
        reason = _build(name, cache)
        if reason is None:
            built.append(name)
        else:
            failed[name] = reason
    return {
        "torch": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype_auto": str(resolve_dtype("auto")).removeprefix("torch."),
        "num_cpus": usable_cpus(),
        "gpu": gpu,
        "gpu_error": gpu_error,
        "kernels_built": built,
        "kernels_failed": failed,
        "arithmetics": _arithmetics(cache) if "linear" in built else [],
    }


def _build(name: str, cache: Path) -> str | None:
    """Why the kernel cannot be built here; None: it is built."""
    from loraplex_kernels.cpu.build import NativeBuildError, load_library

    try:
        load_library(name, cache)
    except (NativeBuildError, OSError) as error:
        return str(error)
    return None


def _arithmetics(cache: Path) -> list[str]:
    """Which products the linear layers can be computed by."""
    import torch
    from loraplex_kernels.cpu.linear import list_arithmetics

    return list(list_arithmetics(torch.bfloat16, cache))


def _try_row_rule(model_dir: Path) -> dict[str, Any]:
    from loraplex_engine.build import assemble_engine
    from loraplex_engine.config import EngineConfig
    from loraplex_engine.errors import EngineError

    config = EngineConfig(model_dir=model_dir, base_model=model_dir.name)
    try:
        engine = assemble_engine(config)
    except (EngineError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        facts = engine.facts
        return {"holds": facts.row_rule_holds, "dtype": facts.dtype, "backends": facts.backends}
    finally:
        engine.close()


def _send_logs_to_stderr() -> None:
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
