"""What a key may call and from where, as values."""

from __future__ import annotations

from ipaddress import ip_network
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.ids import uuid7
from loraplex_platform.tenancy.access import Grants, is_address_allowed, parse_grants

IDS = tuple(uuid7() for _ in range(3))
ids = st.sampled_from(IDS)
sets = st.frozensets(ids)


@given(bases=sets, adapters=sets, deployments=sets, target=ids, base=ids, adapter=st.none() | ids)
def test_a_model_is_allowed_by_its_deployment_its_adapter_or_its_bare_base(
    bases: frozenset[UUID],
    adapters: frozenset[UUID],
    deployments: frozenset[UUID],
    target: UUID,
    base: UUID,
    adapter: UUID | None,
) -> None:
    grants = Grants(base_models=bases, adapters=adapters, deployments=deployments)

    allowed = grants.allows(deployment_id=target, base_model_id=base, adapter_id=adapter)

    bare = adapter is None and base in bases
    assert allowed == (target in deployments or adapter in adapters or bare)


def test_rows_become_grants_and_no_rows_mean_everything() -> None:
    first, second, third = IDS

    assert parse_grants(None) is None
    assert parse_grants([]) is None
    assert parse_grants([f"base:{first}", f"adapter:{second}", f"deployment:{third}"]) == Grants(
        frozenset({first}), frozenset({second}), frozenset({third})
    )


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("192.0.2.1", True),
        ("192.0.2.255", True),
        ("192.0.3.1", False),
        ("::ffff:192.0.2.1", True),
        ("::ffff:192.0.3.1", False),
        ("2001:db8::1", True),
        ("2001:db9::1", False),
        ("", False),
        ("unix", False),
        ("192.0.2.1.example.com", False),
        ("192.0.2.1\n", False),
        ("0300.0.2.1", False),
    ],
)
def test_an_address_is_in_one_of_the_networks(address: str, is_allowed: bool) -> None:
    networks = (ip_network("192.0.2.0/24"), ip_network("2001:db8::/32"))

    assert is_address_allowed(networks, address) is is_allowed
    assert is_address_allowed((), address)
