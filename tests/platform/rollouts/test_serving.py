"""Whether a rollout's two sides can be served by what is there."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loraplex_platform.gateway.builds import ANY_BUILD, BuildRule
from loraplex_platform.rollouts.queries import Side
from loraplex_platform.rollouts.serving import ConnectedFleet

WEIGHTS, TRIED, OTHER = "sha256:w", "sha256:tried", "sha256:other"


@dataclass
class Running:
    """A replica as the fleet looks at it."""

    fingerprint: str
    base_revision: str = WEIGHTS
    is_ready: bool = True

    def serves(self, base_model: str, builds: BuildRule = ANY_BUILD) -> bool:
        return base_model == "tiny" and builds.is_of(self.base_revision, "")


def side(build: str | None = None) -> Side:
    return cast(
        Side,
        SimpleNamespace(
            base_model=SimpleNamespace(name="tiny", revision=WEIGHTS, tokenizer_sha256="t"),
            build=None if build is None else SimpleNamespace(fingerprint=build),
        ),
    )


def problem(replicas: list[Running], stable: Side, canary: Side) -> str | None:
    router = cast(Any, SimpleNamespace(replicas=replicas))
    fleet = ConnectedFleet(sessions=cast(Any, None), router=router, owner="a test")
    return fleet.stable_problem(stable, canary)


@pytest.mark.parametrize(
    "replicas",
    [
        [Running(TRIED), Running(TRIED)],
        [Running(TRIED), Running(OTHER, is_ready=False)],
        [Running(TRIED), Running(OTHER, base_revision="sha256:others")],
    ],
)
def test_a_rollout_waits_where_only_the_tried_build_could_answer_for_stable(
    replicas: list[Running],
) -> None:
    words = problem(replicas, side(), side(TRIED))
    assert words is not None
    assert TRIED in words
    assert WEIGHTS in words


@pytest.mark.parametrize(
    ("stable", "canary"), [(side(), side(TRIED)), (side(), side()), (side(TRIED), side(TRIED))]
)
def test_where_another_build_is_ready_or_none_is_tried_nothing_is_waited_for(
    stable: Side, canary: Side
) -> None:
    replicas = [Running(TRIED), *([Running(OTHER)] if canary.build and not stable.build else [])]
    assert problem(replicas, stable, canary) is None
