"""FcfsPolicy: priority, then arrival, whatever the order of pushes and removals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_engine.policies import FcfsPolicy
from loraplex_engine.request import Request

from tests.support.engine_fakes import make_request


def queued(seq: int, priority: int = 0) -> Request:
    generate = make_request(f"r{seq}", priority=priority)
    return Request(seq=seq, generate=generate, stop_ids=frozenset())


def test_larger_priority_first_then_earlier_arrival() -> None:
    policy = FcfsPolicy()
    for request in (queued(3), queued(1), queued(2, priority=5), queued(0, priority=-1)):
        policy.push(request)

    assert [request.seq for request in policy.in_order()] == [2, 1, 3, 0]


def test_removing_what_is_not_queued_is_caught() -> None:
    policy = FcfsPolicy()
    policy.push(queued(0))

    with pytest.raises(AssertionError, match="not queued"):
        policy.remove(queued(1))


def test_the_order_given_out_does_not_change_under_the_caller() -> None:
    policy = FcfsPolicy()
    for seq in range(3):
        policy.push(queued(seq))

    for request in policy.in_order():
        policy.remove(request)

    assert len(policy) == 0


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=30))
def test_any_pushes_and_removals_keep_the_order(items: list[tuple[int, bool]]) -> None:
    policy = FcfsPolicy()
    expected = []
    for seq, (priority, leaves) in enumerate(items):
        request = queued(seq, priority)
        policy.push(request)
        if leaves:
            policy.remove(request)
        else:
            expected.append((-priority, seq))

    assert [policy.rank(request) for request in policy.in_order()] == sorted(expected)
