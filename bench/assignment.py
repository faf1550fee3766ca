"""What an assignment costs a gateway: `python -m bench.assignment`. The target is under 20 us a request.

CPU time, so that what else the machine does is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from loraplex_platform.rollouts.assignment import chooses_canary, subject_of

TURNS = 7
_TENANT, _KEY = UUID(int=1), UUID(int=2)
_SALT = b"0123456789abcdef"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 where a median misses the target."""
    parser = argparse.ArgumentParser(prog="python -m bench.assignment", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="of each turn (%(default)s)")
    parser.add_argument("--target-us", type=float, default=20.0, help="(%(default)s)")
    values = parser.parse_args(arguments)
    worst_us = 0.0
    print(
        f"subject and arm of a request, us of CPU; {values.requests} requests a turn, {TURNS} turns"
    )
    print(f"{'':34}{'min':>8}{'median':>8}{'max':>8}")
    for name, work in _cases().items():
        times_us = sorted(_turn_us(work, values.requests) for _ in range(TURNS))
        median = statistics.median(times_us)
        worst_us = max(worst_us, median)
        print(f"{name:34}{times_us[0]:8.2f}{median:8.2f}{times_us[-1]:8.2f}")
    return 0 if worst_us < values.target_us else 1


def _cases() -> dict[str, Callable[[], bool]]:
    short = [("system", "You are terse."), ("user", "What is a canary?")]
    turns = [("assistant", "A bird."), ("user", "And then?")] * 100
    book = [("system", "Rules. " * 15_000), ("user", "Once upon a time. " * 6_000)]
    foreign = [("user", "這是一段很長的文字。" * 10_000)]

    def conversation(messages: list[tuple[str, str]]) -> Callable[[], bool]:
        def work() -> bool:
            subject = subject_of(
                "conversation", tenant_id=_TENANT, key_id=_KEY, messages=iter(messages)
            )
            return chooses_canary(_SALT, subject, 500)

        return work

    def by_key() -> bool:
        return chooses_canary(_SALT, subject_of("key", tenant_id=_TENANT, key_id=_KEY), 500)

    def by_user() -> bool:
        subject = subject_of("user", tenant_id=_TENANT, key_id=_KEY, user="someone@example.com")
        return chooses_canary(_SALT, subject, 500)

    return {
        "key": by_key,
        "user": by_user,
        "conversation": conversation(short),
        "conversation of 200 turns": conversation(short + turns),
        "conversation over 210,000 chars": conversation(book),
        "the same in Chinese, 100,000": conversation(foreign),
    }


def _turn_us(work: Callable[[], bool], count: int) -> float:
    began_ns = time.process_time_ns()
    for _ in range(count):
        work()
    return (time.process_time_ns() - began_ns) / count / 1e3


if __name__ == "__main__":
    sys.exit(main())
