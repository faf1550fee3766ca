from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.ids import (
    PREFIXES,
    MalformedIdError,
    format_id,
    parse_id,
    uuid7,
    uuid7_floor,
)

MS = st.integers(0, 2**48 - 1)


@given(MS)
def test_uuid7_has_version_variant_and_time(unix_ms: int) -> None:
    value = uuid7(unix_ms)

    assert (value.version, value.variant) == (7, "specified in RFC 4122")
    assert value.int >> 80 == unix_ms


@given(MS, MS)
def test_uuids_order_by_time_and_their_floor_is_a_lower_bound(one: int, other: int) -> None:
    first, second = sorted((one, other))

    assert uuid7_floor(first) <= uuid7(first)
    if first < second:
        assert uuid7(first) < uuid7_floor(second) <= uuid7(second)


def test_uuids_of_one_millisecond_do_not_repeat() -> None:
    assert len({uuid7(1) for _ in range(10_000)}) == 10_000


@given(st.sampled_from(sorted(PREFIXES)), st.uuids())
def test_ids_survive_the_api(kind: str, value: UUID) -> None:
    assert parse_id(kind, format_id(kind, value)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ten_",
        "key_" + "0" * 32,
        "ten_" + "0" * 31,
        "ten_" + "0" * 33,
        "ten_" + "A" * 32,
        "ten_" + "0" * 31 + "\n",
        "ten_" + "0" * 31 + "٣",
        "ten_00000000-0000-0000-0000-000000000000",
        "TEN_" + "0" * 32,
        "0" * 32,
    ],
)
def test_other_texts_are_not_tenant_ids(text: str) -> None:
    with pytest.raises(MalformedIdError):
        parse_id("tenant", text)
