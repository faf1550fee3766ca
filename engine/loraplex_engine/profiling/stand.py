"""A whole engine in one thread: step loop, core, runner, gateway port, and a gateway that asks and listens.

Nothing is reimplemented: requests come in and tokens go out as frames over a socket, and the loop and the port
take turns as their threads would. One after the other, so that each one's time is its own.

A row's context need not be computed to be measured against: prompts of decode cases are skipped over (see
`skipping`), with a prompt's real keys and values copied to all blocks beforehand.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
import zmq

from loraplex_engine.artifact import ModelShape
from loraplex_engine.build import AssembledEngine, assemble_engine
from loraplex_engine.config import EngineConfig
from loraplex_engine.endpoint import Endpoint
from loraplex_engine.errors import EngineError
from loraplex_engine.forward_pass import PassOutput
from loraplex_engine.gateway_port import GatewayPort
from loraplex_engine.journal import Journal
from loraplex_engine.metrics import EngineMetrics
from loraplex_engine.profiling.adapters import fill_store
from loraplex_engine.profiling.clock import PartClock
from loraplex_engine.profiling.seams import timed_engine
from loraplex_engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    GatewayMessage,
    Generate,
    Hello,
    Rejected,
    SamplingParams,
    decode_from_engine,
    encode,
)
from loraplex_engine.step_loop import Output, StepLoop

_COPIES_AT_ONCE = 32  # blocks: the copy goes through memory of its own
_MAX_WAIT_S = 120.0  # on a busy machine; adapters load meanwhile


class StandError(EngineError):
    """The engine did not do what a profile needs; says what."""


class Stand:
    """See the module's header. Use as a context: it has folders and sockets.

    Args:
        make_config: (URL of an adapter store, or None) -> settings.
        ranks: one adapter of each is made.
    """

    def __init__(
        self,
        model_dir: Path,
        make_config: Callable[[str | None], EngineConfig],
        ranks: Sequence[int],
    ) -> None:
        self._undo = contextlib.ExitStack()
        try:
            folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="lp-")))
            self.shape = ModelShape.from_config_json(model_dir / "config.json")
            self.ranks = tuple(ranks)
            self.digests = fill_store(folder / "store", self.shape, list(ranks))
            config = make_config(f"file://{folder / 'store'}" if ranks else None)
            self.engine: AssembledEngine = assemble_engine(config)
            self._undo.callback(self.engine.close)
            self._open_port(folder, config)
        except BaseException:
            self._undo.close()
            raise
        self._rng = np.random.default_rng(0)
        self._numbers = itertools.count(1)

    def _open_port(self, folder: Path, config: EngineConfig) -> None:
        journal = Journal(folder / "journal")
        self._undo.callback(journal.close)
        endpoint = Endpoint(f"ipc://{folder / 'run' / 'engine.sock'}")
        self._undo.callback(endpoint.close)
        metrics = EngineMetrics(config.base_model)
        self.loop = StepLoop(lambda: self.engine, self._publish)
        self.port = GatewayPort(
            endpoint,
            journal,
            self.loop.submit,
            lambda: self.loop.stats,
            metrics,
            replica_id="profile",
            incarnation="profile",
            max_live=config.most_seqs + config.max_waiting,
            gateway_timeout_s=float("inf"),
        )
        self.port.facts = self.engine.facts
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._undo.callback(context.term)
        self._gateway = context.socket(zmq.DEALER)
        self._undo.callback(self._gateway.close, 0)
        self._gateway.sndhwm = self._gateway.rcvhwm = 0
        self._gateway.connect(endpoint.address)
        self._send(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="profile"))
        self.port.turn(1000)

    def _publish(self, output: Output) -> None:
        self.port.publish(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    @property
    def _vocab_size(self) -> int:
        return self.engine.runner.model.config.num_token_ids

    # ------------------------------------------------------------------ asking

    def ask(self, num_tokens: int, max_tokens: int, adapter: int | None) -> tuple[str, int]:
        """Send a request with a random prompt of its own; returns its id and attempt."""
        ids = self._rng.integers(0, self._vocab_size, num_tokens)
        request = Generate(
            request_id=f"profile-{next(self._numbers)}",
            attempt=1,
            lease_token=1,
            tenant_id="profile",
            tenant_salt=b"profile",
            prompt_token_ids=ids.tolist(),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            adapter_digest=None if adapter is None else self.digests[adapter],
            deadline_unix_s=None,
        )
        self._send(request)
        return request.request_id, request.attempt

    def end(self, requests: Sequence[tuple[str, int]]) -> None:
        """Abort requests and wait for their terminal events."""
        for request_id, attempt in requests:
            self._send(Abort(request_id=request_id, attempt=attempt))
        until = time.monotonic() + _MAX_WAIT_S
        while time.monotonic() < until:
            if not self.port.num_live:
                return
            self.turn()
        raise StandError("requests that were aborted have not ended")

    # ------------------------------------------------------------------ taking turns

    def turn(self, clock: PartClock | None = None) -> float:
        """One turn of the loop and one of the port; what came to the gateway is read.

        Args:
            clock: books the two, by part; what is left of them as "".

        Returns:
            Seconds that the two took.
        """
        self.port.turn(0)
        core = self.engine.core
        wait_s = 0.0 if core.has_work() and core.last_step_num_tokens else 0.005
        with contextlib.ExitStack() as undo:
            both = self._both
            if clock is not None:
                undo.enter_context(
                    timed_engine(clock, self.engine.runner, core, self.loop, self.port)
                )
                both = clock.timed("", both)
            started = time.perf_counter()
            both(wait_s)
            seconds = time.perf_counter() - started
        if self.port.failure is not None:
            raise StandError(f"the engine failed: {self.port.failure}")
        while self._gateway.poll(0):
            message = decode_from_engine(self._gateway.recv())
            if isinstance(message, Rejected):
                raise StandError(f"the engine refused a request: {message.message}")
        return seconds

    def _both(self, wait_s: float) -> None:
        self.loop.turn(self.engine, wait_s)
        self.port.turn(0)

    def turn_until(self, num_rows: int) -> None:
        """Until so many rows run, and a step has computed one token of each."""
        core = self.engine.core
        until = time.monotonic() + _MAX_WAIT_S
        while time.monotonic() < until:
            self.turn()
            stats = self.loop.stats
            running = 0 if stats is None else stats.num_running
            if running == core.last_step_num_tokens == num_rows:
                return
        raise StandError(f"{num_rows} rows never ran in one step")

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Run no model while this is entered: every row that samples gets the same token."""
        forward_pass, vocab = self.engine.runner.forward_pass, self._vocab_size

        def run() -> PassOutput:
            step = forward_pass._prepared
            forward_pass._prepared = None
            assert step is not None
            rows, unsampled = len(step.work.sampled_R), len(step.work.unsampled_U)
            return PassOutput(
                torch.zeros(rows, vocab) if rows else None,
                torch.ones(unsampled, dtype=torch.bool) if unsampled else None,
            )

        vars(forward_pass)["run"] = run
        try:
            yield
        finally:
            del vars(forward_pass)["run"]

    def load_adapters(self) -> None:
        """Have all adapters in host memory: rows that wait for one would let the others run ahead."""
        until = time.monotonic() + _MAX_WAIT_S
        for digest in self.digests:
            self.engine.prefetch(digest)
        while len(self.engine.stats().adapters_host) < len(self.digests):
            if time.monotonic() > until:
                raise StandError(
                    f"{len(self.digests)} adapters were not loaded in {_MAX_WAIT_S:g} s"
                )
            time.sleep(0.01)

    def fill_cache(self, num_tokens: int) -> None:
        """Compute one prompt and copy its keys and values to every block there is."""
        runner = self.engine.runner
        request = self.ask(num_tokens, 8, None)
        self.turn_until(1)
        num_source = num_tokens // runner.limits.block_size
        source = runner._block_table[0, :num_source].astype(np.int64)
        others = np.setdiff1d(np.arange(runner.limits.num_blocks), source)
        with torch.inference_mode():
            for begin in range(0, len(others), _COPIES_AT_ONCE):
                target = others[begin : begin + _COPIES_AT_ONCE]
                copied = np.resize(source, len(target))
                runner.forward_pass.copy_blocks(np.stack((copied, target), axis=1))
        self.end([request])

    def _send(self, message: GatewayMessage) -> None:
        self._gateway.send(encode(message))
        # It goes through a thread of ZeroMQ's: a turn must find it.
        self.port.turn(100)
