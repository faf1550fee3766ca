"""Adapter pools in tests: time that moves when told to, loads that end when told to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


class Clock:
    """Time that moves when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Packed:
    """What the pool holds; says whose it is."""

    digest: str
    size_bytes: int = 1000


class DeferredLoaders(ThreadPoolExecutor):
    """Loads when told to: with threads, what a rule finds would change from one run to the next."""

    def __init__(self) -> None:
        super().__init__(1)
        self._calls: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> int:
        """End what was begun so far; how many that were."""
        calls, self._calls = self._calls, []
        for call in calls:
            call()
        return len(calls)
