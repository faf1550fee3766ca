"""Revisions: the same content never twice, fields that are checked, ETags, and what a rollout holds still."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from loraplex_platform.db.session import Database
from loraplex_platform.ids import format_id, parse_id, uuid7

from tests.platform.control.people import member
from tests.platform.control.stand import BASE, Stand, error_of
from tests.support.metering import run_sql


async def add_build(stand: Stand, **values: Any) -> str:
    """A build that a replica was seen with."""
    build_id = uuid7()
    fields: dict[str, Any] = {
        "id": build_id,
        "fingerprint": f"sha256:{build_id.hex}",
        "base_model": BASE,
        "base_model_id": None,
        "facts": "{}",
    }
    await run_sql(
        stand.db,
        "insert into engine_builds (id, fingerprint, base_model, base_model_id, facts) values"
        " (:id, :fingerprint, :base_model, :base_model_id, cast(:facts as jsonb))",
        **(fields | values),
    )
    return format_id("engine_build", build_id)


async def add_rollout(
    db: Database, deployment_id: str, stable: str, canary: str, state: str
) -> str:
    """A rollout as the rollouts' own code leaves it."""
    rollout_id = uuid7()
    await run_sql(
        db,
        "insert into rollouts (id, tenant_id, deployment_id, stable_revision_id, canary_revision_id, state,"
        " steps, sticky_by, salt, gate, changes, created_by) select :id, tenant_id, id, :stable, :canary,"
        " :state, '[]', 'key', '', '{}', '{}', 'test' from deployments where id = :deployment",
        id=rollout_id,
        stable=parse_id("deployment_revision", stable),
        canary=parse_id("deployment_revision", canary),
        state=state,
        deployment=parse_id("deployment", deployment_id),
    )
    return format_id("rollout", rollout_id)


async def test_content_that_was_there_before_is_that_revision_again(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    cold = {"version_id": None, "params": {"sampling": {"temperature": 0}}}
    # The same in other words.
    cold_too = {"version_id": None, "params": {"sampling": {"temperature": 0.0, "top_p": None}}}

    made = [(await stand.admin.put(path, json=body)).json() for body in (
        {"version_id": None}, cold, {"version_id": None}, cold_too
    )]  # fmt: skip

    assert [item["revision"]["number"] for item in made] == [1, 2, 1, 2]
    assert made[1]["revision"] == made[3]["revision"]
    assert made[1]["revision"]["params"] == {"sampling": {"temperature": 0.0}}


async def test_a_revision_that_nothing_answers_with_is_made_listed_and_compared(
    stand: Stand,
) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    base = (await stand.admin.put(path, json={"version_id": None})).json()["revision"]
    content = {
        "version_id": version_id,
        "params": {"system_prompt": "Be brief.", "sampling": {"max_tokens": 5, "stop": ["\n"]}},
    }

    made = await stand.admin.post(f"{path}/revisions", json=content)
    again = await stand.admin.post(f"{path}/revisions", json=content)

    assert (made.status_code, again.status_code) == (201, 200)
    assert made.json() == again.json()
    revision = made.json()
    assert (await stand.admin.get(path)).json()["revision"] == base
    listed = (await stand.admin.get(f"{path}/revisions", params={"limit": 1})).json()
    assert (listed["data"], listed["has_more"]) == ([revision], True)
    rest = await stand.admin.get(f"{path}/revisions", params={"after": listed["last_id"]})
    assert rest.json()["data"] == [base]
    one = f"{path}/revisions/{revision['id']}"
    compared = (await stand.admin.get(one, params={"against": base["id"]})).json()
    assert {change["field"]: change["after"] for change in compared["changes"]} == {
        "version_id": version_id,
        "digest": revision["digest"],
        "params.system_prompt": "Be brief.",
        "params.sampling.max_tokens": 5,
        "params.sampling.stop": ["\n"],
    }
    assert (await stand.admin.get(one)).json()["changes"] is None
    other = await stand.tenant("globex")
    its = f"/admin/v1/tenants/{other['id']}/deployments/support"
    await stand.admin.put(its, json={"version_id": None})
    error_of(await stand.admin.get(f"{its}/revisions/{revision['id']}"), 404, "not_found")
    error_of(await stand.admin.get(one, params={"against": "rev_x"}), 404, "not_found")


async def test_each_field_of_the_params_is_checked_and_named(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    cases: list[tuple[Any, str]] = [
        ({"sampling": {"temperature": 2.1}}, "params.sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "params.sampling.top_p"),
        ({"sampling": {"top_k": 1.5}}, "params.sampling.top_k"),
        ({"sampling": {"max_tokens": 0}}, "params.sampling.max_tokens"),
        ({"sampling": {"seed": 1}}, "params.sampling.seed"),
        ({"sampling": {"stop": [""]}}, "params.sampling.stop[0]"),
        ({"system_prompt": ""}, "params.system_prompt"),
        ({"system_prompt": 7}, "params.system_prompt"),
        ({"prompt": "x"}, "params.prompt"),
        ({"system_prompt": "a\0b"}, "params"),
        ([], "params"),
    ]

    for params, param in cases:
        refused = await stand.admin.put(path, json={"version_id": None, "params": params})
        error = error_of(refused, 400, "invalid_request")
        assert error["param"] == param, (params, error)
        assert "\0" not in error["message"]
    for text in ('{"version_id": null, "params": {"sampling": {"temperature": NaN}}}',
                 '{"version_id": null, "params": {"system_prompt": "\\ud800"}}'):  # fmt: skip
        headers = {"content-type": "application/json"}
        refused = await stand.admin.put(path, content=text, headers=headers)
        assert refused.status_code == 400, refused.text
    both = {"version_id": None, "follow": {"adapter_id": "adp_x", "alias": "a"}}
    error_of(await stand.admin.put(path, json=both), 400, "invalid_request")


async def test_a_build_must_be_of_the_base_and_read_tokens_as_gateways_do(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    good = await add_build(stand)
    other_base = await add_build(stand, base_model="llama")
    other_tokens = await add_build(stand, facts='{"tokenizer_sha256": "abc"}')

    made = await stand.admin.put(path, json={"version_id": None, "engine_build_id": good})
    assert made.json()["revision"]["engine_build_id"] == good
    assert made.json()["revision"]["fingerprint"].startswith("sha256:")
    for build_id, part in (
        (other_base, "llama"),
        (other_tokens, "abc"),
        ("bld_x", "no such build"),
    ):
        refused = await stand.admin.put(
            path, json={"version_id": None, "engine_build_id": build_id}
        )
        error = error_of(refused, 400, "invalid_request")
        assert error["param"] == "engine_build_id"
        assert part in error["message"]


async def test_new_weights_come_with_their_build(stand: Stand) -> None:
    base_id = uuid7()
    await run_sql(
        stand.db,
        "insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256, architecture)"
        " select :id, name, 'sha256:other', tokenizer_sha256, chat_template_sha256, '{}' from base_models",
        id=base_id,
    )
    build = await add_build(stand, base_model_id=base_id)
    path = f"/admin/v1/deployments/{BASE}"
    current = (await stand.admin.get(path)).json()["revision"]

    made = await stand.admin.post(
        f"{path}/revisions", json={"version_id": None, "engine_build_id": build}
    )

    assert made.json()["base_revision"] == "sha256:other"
    compared = await stand.admin.get(
        f"{path}/revisions/{made.json()['id']}", params={"against": current["id"]}
    )
    fields = {change["field"] for change in compared.json()["changes"]}
    assert fields == {"base_model", "engine_build_id", "fingerprint"}
    assert (await stand.admin.get(path)).json()["revision"] == current


async def test_only_the_operator_chooses_the_price_book_and_a_put_keeps_it(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    builder = await member(stand, tenant["id"], "developer", "dev@acme.example")
    books = (await stand.admin.get("/admin/v1/price-books")).json()["data"]
    [book_id] = [book["id"] for book in books if book["status"] == "published"]
    empty_id = uuid7()
    await run_sql(
        stand.db,
        "insert into price_books (id, name, status) values (:id, 'empty', 'draft')",
        id=empty_id,
    )
    draft = format_id("price_book", empty_id)
    body = {"version_id": None, "price_book_id": book_id}

    refused = await builder.put(path, json=body)
    assert error_of(refused, 403, "permission_denied")["param"] == "price_book_id"
    assert (await stand.admin.put(path, json=body)).json()["revision"]["price_book_id"] == book_id
    kept = await builder.put(path, json={"version_id": None, "params": {"sampling": {"top_k": 3}}})
    assert kept.json()["revision"]["price_book_id"] == book_id, kept.text
    refused = await stand.admin.put(path, json={"version_id": None, "price_book_id": draft})
    error = error_of(refused, 400, "invalid_request")
    assert (error["param"], "draft" in error["message"]) == ("price_book_id", True)
    error_of(await builder.put(path, json={"version_id": None, "price_book_id": None}), 403,
             "permission_denied")  # fmt: skip
    gone = await stand.admin.put(path, json={"version_id": None, "price_book_id": None})
    assert gone.json()["revision"]["price_book_id"] is None


async def test_a_book_without_a_price_for_it_is_refused_with_the_remedy(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    book_id = uuid7()
    # It is over: what was published ends, and stays a book that revisions may name.
    await run_sql(
        stand.db,
        "insert into price_books (id, name, status) values (:id, 'bases only', 'draft')",
        id=book_id,
    )
    for price_class in ("input", "output"):
        await run_sql(
            stand.db,
            "insert into price_items (price_book_id, target_kind, price_class, price_pico)"
            " values (:id, 'any_base', :class, 1)",
            **{"id": book_id, "class": price_class},
        )
    await run_sql(
        stand.db,
        "update price_books set status = 'published', effective_from = now(), published_at = now(),"
        " effective_to = now() where id = :id",
        id=book_id,
    )
    shown = format_id("price_book", book_id)

    refused = await stand.admin.put(path, json={"version_id": version_id, "price_book_id": shown})

    error = error_of(refused, 400, "invalid_request")
    assert error["param"] == "price_book_id"
    assert "no price" in error["message"]
    base = await stand.admin.put(path, json={"version_id": None, "price_book_id": shown})
    assert base.status_code == 200, base.text


async def test_two_admins_at_once_the_second_is_told_the_difference(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    first = await stand.admin.put(path, json={"version_id": None})
    etag = first.headers["etag"]
    warm = {"version_id": None, "params": {"sampling": {"temperature": 1.5}}}
    cold = {"version_id": None, "params": {"sampling": {"temperature": 0.1}}}

    won = await stand.admin.put(path, json=warm, headers={"if-match": etag})
    lost = await stand.admin.put(path, json=cold, headers={"if-match": etag})

    assert won.status_code == 200
    error = error_of(lost, 409, "version_conflict")
    assert "1.5" in error["message"]
    now = await stand.admin.get(path)
    assert now.json() == won.json()
    assert now.headers["etag"] == won.headers["etag"] != etag
    error_of(await stand.admin.delete(path, headers={"if-match": etag}), 409, "version_conflict")
    done = await stand.admin.delete(path, headers={"if-match": now.headers["etag"]})
    assert done.status_code == 204


async def test_while_a_rollout_is_on_its_way_what_it_compares_stays(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"
    deployment = (await stand.admin.put(path, json={"version_id": None})).json()
    warm = {"version_id": None, "params": {"sampling": {"temperature": 1.5}}}
    canary = (await stand.admin.post(f"{path}/revisions", json=warm)).json()
    sides = (deployment["id"], deployment["revision"]["id"], canary["id"])

    rollout = await add_rollout(stand.db, *sides, "canary")

    for refused in (await stand.admin.put(path, json=warm), await stand.admin.delete(path)):
        error = error_of(refused, 409, "rollout_active")
        assert rollout in error["message"]
        assert "abort" in error["message"]
    # What changes nothing is no change, and a further revision is nobody's harm.
    assert (await stand.admin.put(path, json={"version_id": None})).json() == deployment
    hot = {"version_id": None, "params": {"sampling": {"temperature": 2}}}
    assert (await stand.admin.post(f"{path}/revisions", json=hot)).status_code == 201
    await run_sql(stand.db, "update rollouts set state = 'aborted', ended_at = now()")
    assert (await stand.admin.put(path, json=warm)).status_code == 200


async def test_the_platforms_own_deployment_has_revisions_too_and_only_it(stand: Stand) -> None:
    path = f"/admin/v1/deployments/{BASE}"
    base = (await stand.admin.get(path)).json()
    assert base["tenant_id"] is None
    assert [
        item["name"] for item in (await stand.admin.get("/admin/v1/deployments")).json()["data"]
    ] == [BASE]

    body = {"version_id": None, "params": {"system_prompt": "You are kind."}}
    moved = await stand.admin.put(path, json=body)

    assert moved.json()["revision"]["number"] == 2
    error_of(await stand.admin.put("/admin/v1/deployments/other", json=body), 404, "not_found")
    with_version = {"version_id": "ver_" + UUID(int=1).hex}
    refused = await stand.admin.put(path, json=with_version)
    assert error_of(refused, 400, "invalid_request")["param"] == "version_id"
    followed = {"follow": {"adapter_id": "adp_" + UUID(int=1).hex, "alias": "a"}}
    refused = await stand.admin.put(path, json=followed)
    assert error_of(refused, 400, "invalid_request")["param"] == "follow"
    tenant = await stand.tenant("acme")
    owner = await member(stand, tenant["id"], "owner", "owner@acme.example")
    error_of(await owner.put(path, json=body), 403, "permission_denied")


async def test_builds_are_everybodys_to_name_and_their_replicas_the_operators_to_see(
    stand: Stand,
) -> None:
    tenant = await stand.tenant("acme")
    owner = await member(stand, tenant["id"], "owner", "owner@acme.example")
    idle = await add_build(stand)
    running = await add_build(stand, fingerprint=stand.engine.model_fingerprint)

    mine = (await stand.admin.get("/admin/v1/engine-builds")).json()["data"]
    theirs = (await owner.get("/admin/v1/engine-builds")).json()["data"]

    assert [(item["id"], item["replicas"]) for item in mine] == [(running, ["fake-0"]), (idle, [])]
    assert [(item["is_running"], item["replicas"]) for item in theirs] == [
        (True, None),
        (False, None),
    ]


async def test_an_adapter_of_another_base_is_refused(stand: Stand) -> None:
    tenant = await stand.tenant("acme")
    version_id = await stand.version(tenant["id"])
    await run_sql(
        stand.db,
        "with other as (insert into base_models (id, name, revision, tokenizer_sha256, chat_template_sha256,"
        " architecture) values (:id, 'llama', 'r', '', '', '{}') returning id)"
        " update adapters set base_model_id = (select id from other)",
        id=uuid7(),
    )
    path = f"/admin/v1/tenants/{tenant['id']}/deployments/support"

    refused = await stand.admin.put(path, json={"version_id": version_id})

    error = error_of(refused, 400, "invalid_request")
    assert (error["param"], "llama" in error["message"]) == ("version_id", True)
