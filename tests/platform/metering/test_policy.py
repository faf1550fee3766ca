from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.metering.policy import AttemptUsage, Outcome, Split, split

COUNTS = st.integers(0, 1000)


def usage(outcome: Outcome = "completed", **changes: int) -> AttemptUsage:
    values = {"prompt_tokens": 10, "generated": 20} | changes
    return AttemptUsage(outcome=outcome, source="terminal", **values)


@pytest.mark.parametrize(
    ("given_usage", "expected"),
    [
        (usage(), Split("revenue", 20, 0)),
        (usage(discarded_past_stop=3), Split("revenue", 17, 0)),
        (usage("aborted", discarded_past_abort=4), Split("revenue", 16, 0)),
        (usage("aborted", generated=0), Split("revenue", 0, 0)),
        (usage(absorbed_anyway=5), Split("revenue", 15, 5)),
        (usage("fault"), Split("absorbed", 0, 20)),
        (usage("lost"), Split("absorbed", 0, 20)),
        (usage("fault", discarded_past_stop=2), Split("absorbed", 0, 18)),
    ],
)
def test_who_pays(given_usage: AttemptUsage, expected: Split) -> None:
    assert split(given_usage, "user") == expected


def test_a_tenant_never_pays_for_a_probe() -> None:
    for outcome in ("completed", "aborted", "fault", "lost"):
        account = split(usage(outcome), "probe")
        assert (account.account, account.billed, account.charged_tokens) == ("absorbed", 0, 20)


@given(
    st.sampled_from(["completed", "aborted", "fault", "lost"]),
    st.sampled_from(["user", "probe"]),
    *[COUNTS] * 4,
)
def test_every_token_goes_to_exactly_one_place(
    outcome: Outcome, kind: str, generated: int, past_stop: int, past_abort: int, anyway: int
) -> None:
    counted = usage(
        outcome,
        generated=generated,
        discarded_past_stop=past_stop,
        discarded_past_abort=past_abort,
        absorbed_anyway=anyway,
    )
    if past_stop + past_abort + anyway > generated:
        with pytest.raises(ValueError, match="exceed"):
            split(counted, kind)  # type: ignore[arg-type] # one of the two
        return

    account = split(counted, kind)  # type: ignore[arg-type] # one of the two

    assert account.billed + account.absorbed + past_stop + past_abort == generated
    assert min(account.billed, account.absorbed) >= 0


@pytest.mark.parametrize(
    "counts",
    [{"generated": -1}, {"cached_tokens": 11}, {"cached_tokens": -1}, {"prompt_tokens": -1}],
)
def test_impossible_counts_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="exceed"):
        split(usage(**counts), "user")
