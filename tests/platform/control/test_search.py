"""Lists that are searched by name: literally, whatever the capitals, and page by page."""

from __future__ import annotations

import pytest

from tests.platform.control.stand import Stand

NAMES = ("100% sure", "Blue_Whale", "bluexwhale", "ÜBER blue", "מפתח", "plain")


async def found(stand: Stand, path: str, search: str, **query: object) -> list[str]:
    answer = await stand.admin.get(path, params={"search": search, **query})
    assert answer.status_code == 200, answer.text
    return [row["name"] for row in answer.json()["data"]]


@pytest.mark.parametrize(
    ("search", "names"),
    [
        ("blue", ["ÜBER blue", "bluexwhale", "Blue_Whale"]),
        ("e_w", ["Blue_Whale"]),
        ("%", ["100% sure"]),
        ("פת", ["מפתח"]),
        ("  plain  ", ["plain"]),
        ("\\", []),
        ("' or 1=1 --", []),
        ("   ", list(reversed(NAMES))),
    ],
)
async def test_keys_are_found_by_a_piece_of_their_name(
    stand: Stand, search: str, names: list[str]
) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    path = f"/admin/v1/tenants/{tenant_id}/keys"
    for name in NAMES:
        assert (await stand.admin.post(path, json={"name": name})).status_code == 201

    assert await found(stand, path, search) == names


async def test_pages_go_on_within_what_was_searched(stand: Stand) -> None:
    for slug in ("north-1", "south-1", "north-2", "north-3"):
        await stand.tenant(slug)

    first = (
        await stand.admin.get("/admin/v1/tenants", params={"search": "NORTH", "limit": 2})
    ).json()
    rest = await stand.admin.get(
        "/admin/v1/tenants", params={"search": "NORTH", "limit": 2, "after": first["last_id"]}
    )

    assert [row["slug"] for row in first["data"]] == ["north-3", "north-2"]
    assert first["has_more"]
    assert [row["slug"] for row in rest.json()["data"]] == ["north-1"]


async def test_users_and_members_are_found_by_their_email(stand: Stand) -> None:
    tenant_id = (await stand.tenant("acme"))["id"]
    for path in ("/admin/v1/users", f"/admin/v1/tenants/{tenant_id}/members"):
        answer = await stand.admin.get(path, params={"search": "nobody@"})
        assert (answer.status_code, answer.json()["data"]) == (200, [])
    everyone = (await stand.admin.get("/admin/v1/users")).json()["data"]
    some = await stand.admin.get("/admin/v1/users", params={"search": "EXAMPLE.com"})
    assert some.json()["data"] == [u for u in everyone if "example.com" in u["email"]]


async def test_what_postgres_could_not_take_is_refused(stand: Stand) -> None:
    answer = await stand.admin.get("/admin/v1/tenants", params={"search": "a\0b"})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "search"
