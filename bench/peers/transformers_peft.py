"""transformers + PEFT, the versions of this environment: what one has without a serving engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench import workload as files
from bench.peers.base import (
    START_TIMEOUT_S,
    Contender,
    Figures,
    Place,
    Tell,
    UnavailableError,
)
from bench.processes import Served, StartError
from bench.suite import Workload

_POLL_S = 0.2


class TransformersPeft(Contender):
    """One of its two ways.

    Args:
        mode: "one": a request at a time; "batch": padded batches, mixed by `adapter_names`.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.name = f"transformers-{mode}"
        how = "one by one" if mode == "one" else "batches of 16"
        self.title = f"transformers + PEFT, {how}"
        self.cannot = (
            "serves nothing: measured in its process, without HTTP",
            "keeps no prefix: every prompt is computed in full",
            *(() if mode == "one" else ("a batch begins when the last one has ended",)),
        )

    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        """See `Contender`: it is in this environment, or not."""
        if find_spec("peft") is None or find_spec("transformers") is None:
            raise UnavailableError("not installed: pip install 'loraplex[examples,convert]'")

    def is_for(self, workload: Workload) -> bool:
        """See `Contender`: where one is in flight, a batch of one is the other mode."""
        return self._mode == "one" or workload.concurrency > 1

    def replay(self, place: Place, workload: Workload, tell: Tell) -> Figures:
        """See `Contender`. Start-up ends when model and adapters are loaded and have answered once."""
        file = place.scratch / f"{workload.name}.jsonl"
        files.write(workload.items, file)
        command: list[str | Path] = [sys.executable, "-m", "bench.peers.peft_process"]
        command += ["--mode", self._mode, "--model-dir", place.model_dir, "--workload", file]
        command += ["--concurrency", str(workload.concurrency), "--dtype", place.dtype]
        command += ["--num-threads", str(place.num_threads), "--limit-s", str(place.limit_s)]
        for folder in place.adapters(workload):
            command += ["--adapter", folder]
        log = place.scratch / f"{self.name}-{workload.name}.log"
        tell("starting")
        with Served(command, log) as served:
            served.wait_until(lambda: _last_line(log) is not None, START_TIMEOUT_S)
            startup_s = time.perf_counter() - served.started
            deadline = time.monotonic() + 2 * place.limit_s + START_TIMEOUT_S
            while True:
                # In this order: what it wrote last is read after its end was seen.
                code = served.process.poll()
                line = _last_line(log) or {}
                if "output_tokens_per_s" in line:
                    break
                if code is not None:
                    raise StartError(f"it ended with {code}:\n{served.tail()}")
                if time.monotonic() > deadline:
                    raise StartError(f"it hung:\n{served.tail()}")
                tell(f"{line.get('done', 0)} of {len(workload.items)}")
                time.sleep(_POLL_S)
            served.meter.sample()
            return line | {
                "startup_s": startup_s,
                "peak_memory_gib": served.meter.peak_tree_gib,
                "peak_process_gib": served.meter.peak_process_gib,
            }


def _last_line(log: Path) -> Figures | None:
    """The last of its JSON lines; libraries may write others between them."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:  # half written
                continue
            if isinstance(found, dict):
                return found
    return None
