"""llama.cpp's server with all adapters loaded, one slot for each request in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import load
from bench.peers.base import START_TIMEOUT_S, Place, Server, Tell, answers
from bench.peers.llama_build import LlamaTools, find_or_build
from bench.peers.llama_files import adapter_files, base_file
from bench.processes import Served, free_port
from bench.suite import BASE_MODEL, Workload

_CONTEXT_STEP = 64


class LlamaCpp(Server):
    """One kind of weights.

    Args:
        kind: "bf16" or "q4_1".
    """

    cannot = (
        "never computes requests for different adapters in one batch: they take turns",
        "chooses adapters by a field of its own, not by the model's name",
    )

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = f"llama-{kind}"
        self.title = f"llama.cpp {'bf16' if kind == 'bf16' else kind.upper()}"
        self.weights = "bfloat16" if kind == "bf16" else kind.upper()
        if kind == "q4_1":
            self.cannot = (*self.cannot, "runs without its AMX kernels, which crash as built here")
        self._tools: LlamaTools | None = None
        self._base = Path()
        self._adapters: dict[str, Path] = {}

    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        """See `Contender`."""
        self._tools = find_or_build(place.cache, place.num_threads, tell)
        self._base = base_file(self._tools, place.model_dir, place.cache, self._kind, tell)
        folders = sorted({folder for w in workloads for folder in place.adapters(w)})
        files = adapter_files(self._tools, place.model_dir, folders, place.cache, tell)
        self._adapters = {folder.name: file for folder, file in zip(folders, files, strict=True)}

    @contextlib.contextmanager
    def serve(self, place: Place, workload: Workload) -> Iterator[tuple[Served, load.Target]]:
        """See `Server`."""
        assert self._tools is not None, "prepare comes first"
        port = free_port()
        names = [folder.name for folder in place.adapters(workload)]
        slots = workload.concurrency
        per_slot = -(-workload.longest // _CONTEXT_STEP) * _CONTEXT_STEP
        threads = str(place.num_threads)
        command: list[str | Path] = [self._tools.server, "--model", self._base]
        command += ["--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * per_slot), "--threads", threads]
        command += ["--threads-batch", threads, "--threads-http", "2"]
        if self._kind == "q4_1":
            # Its AMX kernel of this type ends with an illegal instruction (tilezero) at the start, as GCC 12 builds
            # it. No other kernel for x86 wants this type repacked.
            command.append("--no-repack")
        for name in names:
            command += ["--lora", self._adapters[name]]
        if names:
            command.append("--lora-init-without-apply")
        log = place.scratch / f"{self.name}-{workload.name}.log"
        with Served(command, log) as served:
            url = f"http://127.0.0.1:{port}"
            served.wait_until(lambda: answers(f"{url}/health"), START_TIMEOUT_S)
            yield served, load.Target(url, extra=_choices(names))


def _choices(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The field that chooses the adapter, by model; the base has to name one, at no scale."""
    chosen = {name: {"lora": [{"id": number, "scale": 1.0}]} for number, name in enumerate(names)}
    if names:
        chosen[BASE_MODEL] = {"lora": [{"id": 0, "scale": 0.0}]}
    return chosen
