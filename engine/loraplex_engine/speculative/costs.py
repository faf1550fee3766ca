"""What a step costs by the number of tokens in it, as measured on the machine at hand.

Whether a draft pays depends on the machine, the model, the adapters and the load: a step of few tokens
waits for the weights to be read and takes more tokens for nearly nothing, a full one computes as long as
it has tokens. So nothing is assumed. Steps that only decode are timed, in classes of similar token
counts. What else the machine does makes steps slower, never faster; so a class costs what its quicker
steps took, and no more than a larger one. Age is counted in steps, so that slow machines and idle hours
do not age what was measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_NUM_REMEMBERED = 7
# Steps for which a measurement counts: one or two may have been unlucky, and are soon made again.
_FRESH_STEPS = 500
_FEW = 3
_FRESH_STEPS_OF_FEW = 50
# What all else is compared with takes two, and is measured anew so often, should only other sizes come.
_NUM_TO_COMPARE = 2
_BASE_STEPS = 64
# Classes are 4 tokens wide, as rows are padded to multiples of 4 (row rule); from here on 16.
_FINE_TOKENS = 64


@dataclass(slots=True)
class _Class:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))
    quick_s: float = 0.0  # their lower quartile
    measured_at: int = 0  # step


class StepCosts:
    """Seconds per step as a function of its tokens."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that only decoded took so long."""
        self._num_steps += 1
        measured = self._classes.setdefault(_class_of(num_tokens), _Class())
        measured.seconds.append(seconds)
        measured.quick_s = sorted(measured.seconds)[(len(measured.seconds) - 1) // 4]
        measured.measured_at = self._num_steps

    def is_known(self, num_tokens: int) -> bool:
        """Whether steps of about so many tokens were measured so lately that others may be compared."""
        measured = self._classes.get(_class_of(num_tokens))
        return (
            measured is not None
            and len(measured.seconds) >= _NUM_TO_COMPARE
            and self._num_steps - measured.measured_at <= _BASE_STEPS
        )

    def seconds_of(self, num_tokens_N: Int64Array) -> Float64Array:
        """Expected seconds of steps with so many tokens; at least those of fewer.

        Between classes that are known it is a line, which goes on beyond the last as it came from half
        of that. Where only one class is known it is flat up to twice that one, and proportional behind:
        so the next larger sizes look cheap, are tried, and are known then. At least one must be known.
        """
        known = sorted(
            (size, measured.quick_s)
            for size, measured in self._classes.items()
            if self._is_fresh(measured)
        )
        size_K, seconds_K = np.asarray(known, np.float64).T
        seconds_K = np.minimum.accumulate(seconds_K[::-1])[::-1]
        size_N, last = _classes_of(num_tokens_N), size_K[-1]
        if len(known) == 1:
            return np.asarray(seconds_K[0] * np.maximum(1.0, size_N / (2 * last)))
        half = max(0, int(np.searchsorted(size_K, last / 2, side="right")) - 1)
        slope = (seconds_K[-1] - seconds_K[half]) / (last - size_K[half])
        seconds_N = np.interp(size_N, size_K, seconds_K)
        return np.asarray(seconds_N + slope * np.maximum(0.0, size_N - last))

    def _is_fresh(self, measured: _Class) -> bool:
        is_one_of_few = len(measured.seconds) < _FEW
        max_age = _FRESH_STEPS_OF_FEW if is_one_of_few else _FRESH_STEPS
        return self._num_steps - measured.measured_at <= max_age


def _class_of(num_tokens: int) -> int:
    """The largest token count of its class."""
    width = 4 if num_tokens <= _FINE_TOKENS else 16
    return -(-num_tokens // width) * width


def _classes_of(num_tokens_N: Int64Array) -> Int64Array:
    width_N = np.where(num_tokens_N <= _FINE_TOKENS, 4, 16)
    return np.asarray(-(-num_tokens_N // width_N) * width_N)
