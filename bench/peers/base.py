"""What every contender of `make bench` gives: how to make it ready, and one measured replay of a workload.

Each replay is a process tree of its own: started, warmed up, measured, ended. So nothing else of ours runs
meanwhile, its memory is its own, and its start-up time is measured as often as its speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import load
from bench.processes import Served
from bench.suite import Workload
from bench.workload import WorkItem

Tell = Callable[[str], None]  # hears what takes a while
Figures = dict[str, Any]  # of one replay: load.summarise's, with start-up time and memory

START_TIMEOUT_S = 600.0
_WARM_TOKENS = 4
_WARM_PROMPT = 8


class UnavailableError(Exception):
    """This contender cannot be had, or cannot do this workload, here; says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and on what a bench runs."""

    model_dir: Path
    adapters_dir: Path  # a PEFT folder per adapter, by name
    cache: Path  # what is worth keeping between runs: environments, builds, converted weights
    scratch: Path  # of this run: logs, data
    dtype: str  # what the peers compute in: as ours does by default here
    num_threads: int
    limit_s: float  # a replay is cut off after so long

    def adapters(self, workload: Workload) -> list[Path]:
        """Folders of the adapters that the workload asks for; none where it goes without LoRA."""
        return [self.adapters_dir / name for name in sorted({m for _, m in workload.models})]


class Contender(ABC):
    """One product, set up one way."""

    name: str
    title: str
    weights: str = ""  # the type its weights are kept in; "": the bench's dtype
    cannot: Sequence[str] = ()  # what it cannot do, said under the table

    @abstractmethod
    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        """Install, build and convert what it needs; once, before anything is measured.

        Raises:
            UnavailableError: it cannot be had here.
        """

    def is_for(self, workload: Workload) -> bool:
        """Whether the workload asks for what this one is about."""
        return True

    @abstractmethod
    def replay(self, place: Place, workload: Workload, tell: Tell) -> Figures:
        """Start, warm up, measure, end.

        Raises:
            UnavailableError, StartError: it did not work, and why.
        """


class Server(Contender):
    """A contender that is asked over HTTP."""

    @abstractmethod
    @contextlib.contextmanager
    def serve(self, place: Place, workload: Workload) -> Iterator[tuple[Served, load.Target]]:
        """A process tree that answers, from its start to its end."""

    def replay(self, place: Place, workload: Workload, tell: Tell) -> Figures:
        """See `Contender`. Start-up ends with the first answer, to a prompt of one token."""
        tell("starting")
        with self.serve(place, workload) as (served, target):
            first = _warm_items(workload, 1, max_tokens=1)
            _ask_until_answered(target, first)
            startup_s = time.perf_counter() - served.started
            tell("warming up")
            many = _warm_items(workload, min(workload.concurrency, 8), max_tokens=_WARM_TOKENS)
            _warm_up(target, many, place.limit_s)
            total = len(workload.items)
            tell(f"0 of {total}")
            samples = asyncio.run(
                load.replay(
                    target,
                    workload.items,
                    concurrency=workload.concurrency,
                    limit_s=place.limit_s,
                    on_done=lambda done: tell(f"{done} of {total}"),
                )
            )
            served.meter.sample()
            return load.summarise(samples, total) | {
                "startup_s": startup_s,
                "peak_memory_gib": served.meter.peak_tree_gib,
                "peak_process_gib": served.meter.peak_process_gib,
            }


def _warm_items(workload: Workload, count: int, *, max_tokens: int) -> list[WorkItem]:
    """Short requests to models of the workload, with prompts that no workload holds."""
    rng = random.Random(workload.name)
    chosen = [workload.items[idx % len(workload.items)] for idx in range(count)]
    return [
        WorkItem(
            idx,
            item.model,
            [rng.randrange(1000, 2000) for _ in range(_WARM_PROMPT)],
            max_tokens,
            item.tenant,
        )
        for idx, item in enumerate(chosen)
    ]


def _ask_until_answered(target: load.Target, items: list[WorkItem]) -> None:
    """The first answer; a server that says it is ready must give one.

    Raises:
        UnavailableError: it answers with an error.
    """
    samples = asyncio.run(load.replay(target, items, concurrency=1, limit_s=START_TIMEOUT_S))
    if samples[0].error is not None:
        raise UnavailableError(f"its first answer failed: {samples[0].error}")


def _warm_up(target: load.Target, items: list[WorkItem], limit_s: float) -> None:
    """Ask all at once; what fails here would fail, or run cold, when it is measured.

    Raises:
        UnavailableError: one of them was not answered in full.
    """
    samples = asyncio.run(load.replay(target, items, concurrency=len(items), limit_s=limit_s))
    errors = sorted({sample.error for sample in samples if sample.error is not None})
    if errors:
        raise UnavailableError(f"its warm-up failed: {'; '.join(errors[:3])}")


def answers(url: str) -> bool:
    """Whether a GET of this address is answered with 200."""
    try:
        return httpx.get(url, timeout=5.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
