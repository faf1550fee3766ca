"""A whole engine server without a model: the real socket, journal, core and scheduler, and a runner
that makes tokens up. For tests of the server, in this process or as one that can be killed:

`python -m tests.support.fake_replica --step-s 0.02 -- --address ipc://... --journal-dir ...`
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from loraplex_engine.config import EngineConfig, EngineSizes
from loraplex_engine.core import EngineCore, build_core
from loraplex_engine.errors import AdapterUnavailableError, PinRefusedError
from loraplex_engine.protocol import EngineStats
from loraplex_engine.request import BlockReason
from loraplex_engine.server import EngineServer
from loraplex_engine.server_cli import read_options, set_up_logging
from loraplex_engine.step import Step, StepResult
from loraplex_engine.step_loop import ReplicaFacts

VOCAB_SIZE = 1000
EOS_ID = 0
BOMB_ID = 666  # a prompt that starts with it makes the step raise
NAN_ID = 667  # ... or its logits not finite
HANG_ID = 668  # ... or the step never end
MAX_PINS = 2
UNKNOWN_DIGEST = "sha256:" + "0" * 64


class FakeExecutor:
    """Token i of a row is last token + 1, modulo the vocabulary, never EOS.

    `flowing` cleared holds every step in mid-air, `is_held` tells that one is; `step_s` is how long one takes.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.flowing = threading.Event()
        self.flowing.set()
        self.is_held = threading.Event()
        self._rows: dict[int, list[int]] = {}
        self._steps: deque[Step] = deque()

    def launch(self, step: Step) -> None:
        for row in step.freed_rows:
            self._rows.pop(row, None)
        for new_row in step.new_rows:
            self._rows[new_row.row] = list(new_row.token_ids)
        self._steps.append(step)

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        if self.step_s:
            time.sleep(self.step_s)
        if not self.flowing.is_set():
            self.is_held.set()
            self.flowing.wait()
            self.is_held.clear()
        count = len(step.rows_B)
        sampled: list[tuple[int, ...]] = [()] * count
        is_finite_B = np.ones(count, np.bool_)
        for i, row in enumerate(step.rows_B.tolist()):
            tokens = self._rows[row]
            if tokens[0] == BOMB_ID:
                raise RuntimeError("the bomb went off")
            if tokens[0] == HANG_ID:
                threading.Event().wait()
            is_finite_B[i] = tokens[0] != NAN_ID
            if step.samples_B[i]:
                tokens.append(tokens[-1] % (VOCAB_SIZE - 1) + 1)
                sampled[i] = (tokens[-1],)
        return StepResult(step.step_id, sampled, is_finite_B)


class FakeAdapters:
    """Every digest loads at once into a slot of its own, but for `UNKNOWN_DIGEST`."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.num_leases = 0
        self.prefetched: list[str] = []
        self.fault: Exception | None = None  # raised by the next prefetch

    def prefetch(self, digest: str, tenant_id: str = "") -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.prefetched.append(digest)

    def lease(self, digest: str, tenant_id: str = "") -> int | None:
        if digest == UNKNOWN_DIGEST:
            raise AdapterUnavailableError("the store does not have it")
        self.num_leases += 1
        return self.slots.setdefault(digest, len(self.slots))

    def is_loaded(self, digest: str) -> bool:
        return True

    def why_refused(self, digest: str, tenant_id: str = "") -> BlockReason:
        raise AssertionError("a slot for everybody")

    def release(self, digest: str, tenant_id: str = "") -> None:
        self.num_leases -= 1


class FakeReplicaEngine:
    """`step_loop.Engine` around a real core and scheduler."""

    def __init__(self, config: EngineConfig, step_s: float = 0.0, num_blocks: int = 256) -> None:
        self.executor = FakeExecutor(step_s)
        self.num_tidied = 0
        self.pinned: frozenset[str] = frozenset()
        self.adapters = FakeAdapters()
        self.core: EngineCore = build_core(
            config,
            EngineSizes(block_bytes=16, num_blocks=num_blocks, max_model_len=2048),
            self.executor,
            self.adapters,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS_ID}),
        )
        self.facts = ReplicaFacts(
            model_fingerprint="sha256:" + "f" * 64,
            kv_format="fake",
            device="cpu",
            isa="none",
            dtype="float32",
            torch_version="none",
            backends={},
            max_model_len=2048,
            row_rule_holds=True,
        )

    def prefetch(self, digest: str) -> None:
        self.adapters.prefetch(digest)

    def pin(self, digest: str) -> None:
        if len(self.pinned) == MAX_PINS:
            raise PinRefusedError("too_many_pins", f"{MAX_PINS} adapters can be pinned")
        self.pinned |= {digest}

    def unpin(self, digest: str) -> None:
        self.pinned -= {digest}

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self.core.stats(),
            adapters_resident=list(self.adapters.slots),
            adapters_host=list(self.adapters.slots),
            adapters_pinned=sorted(self.pinned),
        )

    def attach(self, wake: Callable[[], None], observe_load: Callable[[str, float], None]) -> None:
        self.wake, self.observe_load = wake, observe_load

    def tidy(self) -> None:
        self.num_tidied += 1

    def close(self) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("rest", nargs="*")
    values = parser.parse_args()
    options_values, config, options = read_options(
        ["--model-dir", str(Path(".")), *values.rest], dict(os.environ)
    )
    set_up_logging(options_values.log_level, options_values.log_format)
    server = EngineServer(config, options, lambda: FakeReplicaEngine(config, values.step_s))
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
