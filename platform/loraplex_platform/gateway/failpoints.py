"""Named points at which a test lets a process fail: a gateway on a request's path, a worker, a control API.

Without one they do nothing.

    LORAPLEX_FAILPOINT=after_tx1:kill               the process dies there, as by kill -9
    LORAPLEX_FAILPOINT=mid_stream:kill#5            the fifth time that it gets there
    LORAPLEX_FAILPOINT=inside_tx2:kill(0.1)         0.1 s after the transaction was begun
    LORAPLEX_FAILPOINT=before_tx2:stall(30)         the whole process stands still for half a minute
    LORAPLEX_FAILPOINT=before_dispatch:error        an exception that nobody expects
    LORAPLEX_FAILPOINT=clock:skew(3600)#20          from the 20th request on its clock is an hour ahead

Several are separated by commas. The settings refuse any of them unless LORAPLEX_ALLOW_FAILPOINTS says
that this is a test.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

Point = Literal[
    "after_admit",  # past the rate limits
    "before_tx1",
    "inside_tx1",
    "after_tx1",
    "before_dispatch",
    "before_send",  # the lease has been looked at, the engine has not heard of the request
    "after_first_token",
    "mid_stream",  # with each later event of the engine's
    "before_terminal",  # the engine's last event is here, and not looked at yet
    "after_terminal",
    "before_tx2",
    "inside_tx2",
    "after_tx2",
    "after_answer",
    "clock",
]
# Of the other processes, whose settings take the same.
WorkerPoint = Literal[
    "rollout_claimed",
    "rollout_looked",  # its requests are summed, nothing is decided
    "inside_transition",  # all of it is written, nothing is committed
    "after_transition",
]
ControlPoint = Literal[
    "before_commit",  # of a change
    "after_commit",  # before it is answered
]
POINTS: Final = get_args(Point)
WORKER_POINTS: Final = get_args(WorkerPoint)
CONTROL_POINTS: Final = get_args(ControlPoint)
_ALL: Final = (*POINTS, *WORKER_POINTS, *CONTROL_POINTS)
_ACTION: Final = re.compile(r"(\w+):(kill|stall|error|skew)(?:\((-?[\d.]+)\))?(?:#(\d+))?")


class FailpointError(Exception):
    """What `error` raises; as an argument of `Failpoints`: what is wrong with it."""


@dataclass(slots=True)
class _Action:
    kind: str
    seconds: float
    countdown: int  # acts when it gets to zero

    def is_due(self) -> bool:
        self.countdown -= 1
        return self.countdown == 0


class Failpoints:
    """See the module's header.

    Args:
        spec: as in LORAPLEX_FAILPOINT; empty: none.
        points: that the process has; those of other processes are left to them.

    Raises:
        FailpointError: `spec` cannot be read.
    """

    def __init__(self, spec: str = "", points: Sequence[str] = POINTS) -> None:
        self._actions: dict[str, _Action] = {}
        self._skew_s = 0.0
        for part in filter(None, (text.strip() for text in spec.split(","))):
            match = _ACTION.fullmatch(part)
            if match is None or match[1] not in _ALL:
                raise FailpointError(
                    f"'{part[:80]}' is no failpoint: use POINT:kill, POINT:stall(SECONDS), POINT:error or"
                    f" clock:skew(SECONDS), with #N for the Nth time; points are {', '.join(_ALL)}"
                )
            if (match[2] == "skew") != (match[1] == "clock"):
                raise FailpointError(f"'{part}': 'clock' and 'skew' go together")
            if match[1] not in points:
                continue  # another process's, which has the same environment
            self._actions[match[1]] = _Action(match[2], float(match[3] or 0), int(match[4] or 1))

    def hit(self, point: Point | WorkerPoint | ControlPoint) -> None:
        """Somebody got here."""
        if self._actions and (action := self._actions.get(point)) and action.is_due():
            self._act(action, point)

    def unix_ms(self) -> int | None:
        """The time for a request's id; None: the clock is right."""
        if self._actions and (action := self._actions.get("clock")) and action.is_due():
            self._skew_s = action.seconds
        return None if self._skew_s == 0 else round((time.time() + self._skew_s) * 1000)

    def _act(self, action: _Action, point: str) -> None:
        if point in ("inside_tx1", "inside_tx2"):
            # The transaction is under way by then: the tests' database takes its time over it.
            asyncio.get_running_loop().call_later(action.seconds, _do, action.kind, 0.0)
        else:
            _do(action.kind, action.seconds)


def _do(kind: str, seconds: float) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stall":
        time.sleep(seconds)
    else:
        raise FailpointError("a failpoint of a test")


INERT: Final = Failpoints()
