"""`loraplex bench profile`: measures the gateway here, hands that to the engine's half, which prints everything.

Two processes, as in life: the gateway's has no torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog

from loraplex_platform.local.base_model import BaseModel, find_base_model

_ENGINE = (sys.executable, "-m", "loraplex_engine.profiling")
_DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_BATCHES = "1,4,16,64"


def run(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    # The flags are the engine's, and so are their faults: here only what the gateway must know of them.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model", default=_DEFAULT_MODEL)
    parser.add_argument("--batch", default=_DEFAULT_BATCHES)
    parser.add_argument("--no-gateway", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        return _run_engine(arguments)
    batches = options.batch.split(",")
    is_valid = all(batch.isdigit() and int(batch) > 0 for batch in batches)
    if options.help or options.no_gateway or not is_valid:
        return _run_engine(arguments)
    model = find_base_model(options.model)
    with tempfile.TemporaryDirectory(prefix="lp-") as folder:
        figures = Path(folder) / "gateway.json"
        figures.write_text(json.dumps(_measure(model, sorted({int(batch) for batch in batches}))))
        return _run_engine([*arguments, "--gateway-figures", str(figures)])


def _measure(model: BaseModel, batches: Sequence[int]) -> list[dict[str, float]]:
    """As the engine's half reads them: `loraplex_engine.profiling.figures.GatewayFigures`."""
    from loraplex_platform.profiling.stand import measure_gateway

    # The replayed engine hangs up when it is done, and the client says so.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    found: list[dict[str, float]] = []
    for batch in batches:
        sys.stderr.write(f"[gateway] streaming to {batch} clients\n")
        cost = measure_gateway(model.folder, batch)
        found.append(
            {
                "batch": batch,
                "receive_ms": cost.receive_ms,
                "detokenize_ms": cost.detokenize_ms,
                "stream_ms": cost.stream_ms,
            }
        )
    return found


def _run_engine(arguments: Sequence[str]) -> int:
    return subprocess.run([*_ENGINE, *arguments], check=False).returncode
