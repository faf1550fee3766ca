"""How often a request's drafts come true, and when to leave it alone.

Two answers per request. The *rate* is the probability that a draft is accepted given that those before it
were: recent trials count more, and a request of which little is known is taken for like all others. The
*pause* needs no estimate: drafts that fail several times in a row are not made for a while, twice as
long each time, until one comes true. Distances are counted in output tokens of the request.
"""

from __future__ import annotations

from dataclasses import dataclass

# Weight that a trial keeps from one block of drafts, or one output token without any, to the next.
_MEMORY = 0.9
_IDLE_MEMORY = 0.98
# How many trials the experience with all requests stands for in the estimate of one.
_PRIOR_TRIALS = 2.0
_FIRST_RATE = 0.5  # before anything was tried
_ALL_MEMORY = 0.995

_FAILURES_BEFORE_PAUSE = 5
_FAILURES_BEFORE_NEXT = 2  # after a pause, so that one unlucky block does not prolong it
_FIRST_PAUSE = 8  # output tokens
_MAX_PAUSE = 256


@dataclass(slots=True)
class _Record:
    accepted: float = 0.0
    tried: float = 0.0
    noted_at: int = 0  # output tokens then
    failures: int = 0  # blocks in a row of which nothing was accepted
    pause: int = 0  # length of the last pause; 0: drafts come true
    paused_until: int = 0


class Acceptance:
    """Records by request key; one step thread."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._accepted = _FIRST_RATE * _PRIOR_TRIALS
        self._tried = _PRIOR_TRIALS

    def rate(self, key: int, num_output: int) -> float:
        """Probability that a request's next draft is accepted, given the ones before it; in (0, 1)."""
        prior = self._accepted / self._tried
        record = self._records.get(key)
        if record is None:
            return prior
        faded = _IDLE_MEMORY ** (num_output - record.noted_at)
        accepted = record.accepted * faded + prior * _PRIOR_TRIALS
        return accepted / (record.tried * faded + _PRIOR_TRIALS)

    def is_paused(self, key: int, num_output: int) -> bool:
        """Whether to leave this request alone now."""
        record = self._records.get(key)
        return record is not None and num_output < record.paused_until

    def note(self, key: int, num_output: int, num_drafts: int, num_accepted: int) -> None:
        """A block of drafts was verified; `num_output` counts what it brought."""
        record = self._records.setdefault(key, _Record())
        # A draft behind the first that failed was never put to the test.
        tried = min(num_accepted + 1, num_drafts)
        record.accepted = record.accepted * _MEMORY + num_accepted
        record.tried = record.tried * _MEMORY + tried
        record.noted_at = num_output
        self._accepted = self._accepted * _ALL_MEMORY + num_accepted
        self._tried = self._tried * _ALL_MEMORY + tried
        if num_accepted:
            record.failures = record.pause = 0
            return
        record.failures += 1
        if record.failures >= (_FAILURES_BEFORE_NEXT if record.pause else _FAILURES_BEFORE_PAUSE):
            self.pause(key, num_output)

    def pause(self, key: int, num_output: int) -> None:
        """Leave a request alone for a while, twice as long as the last time."""
        record = self._records.setdefault(key, _Record(noted_at=num_output))
        record.pause = min(max(_FIRST_PAUSE, 2 * record.pause), _MAX_PAUSE)
        record.paused_until = num_output + record.pause
        record.failures = 0

    def forget(self, key: int) -> None:
        """The request is gone."""
        self._records.pop(key, None)
