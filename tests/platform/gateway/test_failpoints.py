"""Failpoints do nothing unless asked to, and only tests may ask."""

from __future__ import annotations

import time
from uuid import UUID

import pytest
from loraplex_platform.gateway.failpoints import INERT, POINTS, FailpointError, Failpoints
from loraplex_platform.ids import unix_s_of, uuid7
from loraplex_platform.settings import GatewaySettings
from pydantic import ValidationError

_SETTINGS = {
    "database_url": "postgresql://nobody@localhost/none",
    "model_dir": "/nowhere",
    "key_pepper": "pepper-for-tests-0123456789abcdefgh",
    "salt_key": "salt-for-tests-0123456789abcdefghij",
}


def test_without_any_nothing_happens() -> None:
    for point in POINTS:
        INERT.hit(point)

    assert INERT.unix_ms() is None


def test_the_nth_time_and_only_then() -> None:
    failpoints = Failpoints("before_tx2:error#3, mid_stream:error")

    failpoints.hit("before_tx2")
    failpoints.hit("before_tx1")
    failpoints.hit("before_tx2")
    with pytest.raises(FailpointError):
        failpoints.hit("before_tx2")
    failpoints.hit("before_tx2")
    with pytest.raises(FailpointError):
        failpoints.hit("mid_stream")


def test_a_clock_jumps_once_and_stays_there() -> None:
    failpoints = Failpoints("clock:skew(-3600)#2")

    assert failpoints.unix_ms() is None
    for _ in range(2):
        made_at_s = unix_s_of(UUID(int=uuid7(failpoints.unix_ms()).int))
        assert abs(made_at_s - (time.time() - 3600)) < 60


@pytest.mark.parametrize(
    "spec", ["nowhere:kill", "before_tx1", "before_tx1:dance", "clock:kill", "before_tx1:skew(1)"]
)
def test_what_cannot_be_read_is_refused(spec: str) -> None:
    with pytest.raises(FailpointError):
        Failpoints(spec)


def test_the_settings_refuse_them_outside_of_tests() -> None:
    with pytest.raises(ValidationError, match="LORAPLEX_ALLOW_FAILPOINTS"):
        GatewaySettings.model_validate(_SETTINGS | {"failpoint": "before_tx1:kill"})

    allowed = {"failpoint": "before_tx1:kill", "allow_failpoints": True}
    assert GatewaySettings.model_validate(_SETTINGS | allowed).failpoint == "before_tx1:kill"
