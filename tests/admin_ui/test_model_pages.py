"""Deployments with revisions and pins, aliases, rollouts, evals and engine builds, against the real control API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from loraplex_admin.api import Api

from tests.admin_ui.driver import (
    checked,
    confirm,
    fill,
    keys_of,
    open_page,
    press,
    records,
    table,
    words,
)
from tests.admin_ui.stand import Stand
from tests.platform.control.stand import adapter
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def admin(platform: Stand) -> Api:
    return platform.api()


def two_versions(platform: Stand, tenant: dict[str, Any]) -> tuple[str, list[str]]:
    """An adapter with two versions: its id and theirs."""
    made = [
        platform.upload(tenant["id"], "capitals", adapter(seed=seed), is_probed=False)
        for seed in (1, 2)
    ]
    return made[0]["id"], [one["version"]["id"] for one in made]


# ----------------------------------------------------------------------- deployments, aliases


def test_a_revision_is_made_compared_and_pinned(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    _, (first, second) = two_versions(platform, tenant)
    platform.deploy(tenant["id"], "capitals", first)
    test = open_page("deployments", admin, tenant, id="capitals")
    assert list(table(test, "deployments")["answers with"]) == ["capitals v1"]

    test.selectbox(key="revision_version_id").set_value(second)
    fill(test, revision_temperature="hot")
    press(test, "revision_go")
    assert "Write a number" in words(test)
    fill(test, revision_temperature="0.2")
    test.text_area(key="revision_system_prompt").set_value("Answer in verse.")
    press(test, "revision_go")
    revisions = admin.of_tenant(tenant["id"], "deployments").under("capitals", "revisions")
    new, old = revisions.page()["data"]
    assert new["params"] == {"sampling": {"temperature": 0.2}, "system_prompt": "Answer in verse."}
    assert admin.deployments(tenant["id"])["data"][0]["revision"]["id"] == old["id"]

    beside = open_page("deployments", admin, tenant, id="capitals", revisions_id=new["id"])
    fields = {row["field"] for row in records(beside, "now")}
    assert any("version" in field or "adapter" in field for field in fields)

    fill(test, deploy_name="capitals")
    test.text_area(key="deploy_system_prompt").set_value("Be short.")
    press(test, "deploy_go")
    kept = open_page("deployments", admin, tenant)
    fill(kept, deploy_name="capitals", deploy_top_p="0.9")
    press(kept, "deploy_go")
    now = admin.deployments(tenant["id"])["data"][0]["revision"]
    assert now["params"] == {"sampling": {"top_p": 0.9}, "system_prompt": "Be short."}  # type: ignore[typeddict-item]

    fill(test, pin_revision_id=new["id"], pin_reason="audited")
    press(test, "pin_go")
    [pin] = admin.of_tenant(tenant["id"], "pins").page()["data"]
    assert (pin["revision_id"], pin["until"]) == (new["id"], None)
    assert [row["until"] for row in records(test, "stays at")] == ["for good"]


def test_an_alias_is_set_moved_and_what_is_unused_is_retired(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    adapter_id, (first, second) = two_versions(platform, tenant)
    test = open_page("adapters", admin, tenant, id=adapter_id)
    assert not test.error, words(test)
    fill(test, alias_alias="production")
    test.selectbox(key="alias_version_id").set_value(first)
    press(test, "alias_go")
    test = open_page("adapters", admin, tenant, id=adapter_id)
    fill(test, alias_alias="production")
    test.selectbox(key="alias_version_id").set_value(second)
    press(test, "alias_go")
    assert list(table(test, "aliases")["names"]) == ["version 2"]
    history = open_page("adapters", admin, tenant, id=adapter_id, aliases_id="production")
    assert [row["production named"] for row in records(history, "production named")] == [
        "version 2",
        "version 1",
    ]

    for version in (first, second):
        checked(test.toggle(key=f"uses_{version}").set_value(True).run())
    assert f"retire_{second}" not in keys_of(test)  # its alias names it
    confirm(test, f"retire_{first}", "v1")
    assert "That is not the name" in words(test)
    confirm(test, f"retire_{first}", "capitals v1")
    statuses = {
        version["id"]: version["status"]
        for version in admin.adapters(tenant["id"])["data"][0]["versions"]
    }
    assert statuses == {first: "retired", second: "ready"}
    press(test, f"unretire_{first}")
    confirm(history, "unalias", "production")
    assert table(open_page("adapters", admin, tenant, id=adapter_id), "aliases") is None


# ----------------------------------------------------------------------------------- rollouts


def test_a_rollout_is_drafted_started_watched_and_aborted(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    _, (first, second) = two_versions(platform, tenant)
    platform.deploy(tenant["id"], "capitals", first)
    platform.post(
        f"/tenants/{tenant['id']}/deployments/capitals/revisions", json={"version_id": second}
    )
    test = open_page("rollouts", admin, tenant)
    assert "Nothing was rolled out yet" in words(test)
    test.text_area(key="new_rollout_weights").set_value("1\nmany")
    press(test, "new_rollout_go")
    assert "Write percents" in words(test)
    test.text_area(key="new_rollout_weights").set_value("5\n1")
    press(test, "new_rollout_go")
    assert "weights only grow" in words(test).replace("\\", "")
    test.text_area(key="new_rollout_weights").set_value("10\n50 %")
    test.number_input(key="new_rollout_shadow").set_value(0)
    press(test, "new_rollout_go")

    rollouts = admin.of_tenant(tenant["id"], "rollouts")
    [draft] = rollouts.page()["data"]
    assert [step["weight_bp"] for step in draft["steps"]] == [1000, 5000]
    press(test, f"start_{draft['id']}")
    wait_until(lambda: rollouts.get(draft["id"])["state"] == "canary", deadline_s=60)
    checked(test.run())
    assert "canary" in words(test)
    assert [row["step"] for row in records(test, "may go on")] == [
        "canary for 10.0% of the subjects",
        "canary for 50.0% of the subjects",
    ]
    press(test, f"pause_{draft['id']}")
    assert rollouts.get(draft["id"])["is_paused"]
    confirm(test, f"abort_{draft['id']}", "something else")
    assert rollouts.get(draft["id"])["state"] == "canary"
    confirm(test, f"abort_{draft['id']}", "capitals")
    assert rollouts.get(draft["id"])["state"] == "aborted"
    kinds = {row["what"] for row in records(test, "in words") if "what" in row}
    assert {"created", "started", "paused", "aborted"} <= kinds


# -------------------------------------------------------------------------------------- evals


@pytest.mark.slow
def test_a_suite_is_brought_run_read_case_by_case_and_compared(
    platform: Stand, admin: Api, tenant: dict[str, Any]
) -> None:
    platform.deploy(tenant["id"], "only-base", None)
    lines = [
        {
            "id": "france",
            "messages": [{"role": "user", "content": "Capital of France?"}],
            "checks": [{"type": "contains", "value": "base model"}],
        },
        {
            "id": "spain",
            "messages": [{"role": "user", "content": "Capital of Spain?"}],
            "checks": [{"type": "contains", "value": "Madrid"}],
        },
    ]
    test = open_page("evals", admin, tenant)
    assert "No suite yet" in words(test)
    fill(test, new_suite_name="capitals")
    test.file_uploader(key="new_suite_file").set_value(
        ("capitals.jsonl", b'{"id": 1}\nnot json', "application/json")
    )
    press(test, "new_suite_go")
    assert "Line 2 of the file is not JSON" in words(test).replace("\\", "")
    content = "\n".join(map(json.dumps, lines)).encode()
    test.file_uploader(key="new_suite_file").set_value(
        ("capitals.jsonl", content, "application/json")
    )
    press(test, "new_suite_go")
    assert "is at version 1: 2 cases" in words(test)

    runs = admin.of_tenant(tenant["id"], "eval-runs")
    for _ in range(2):
        press(test, "new_run_go")
    wait_until(
        lambda: all(one["state"] not in ("queued", "running") for one in runs.page()["data"]),
        deadline_s=60,
    )
    second, first = runs.page()["data"]
    results = runs.under(second["id"], "results").page()["data"]
    assert second["state"] == "failed", (second["error"], [one["reason"] for one in results])
    opened = open_page("evals", admin, tenant, id=second["id"], **{"with": first["id"]})
    results = table(opened, "results").set_index("case")
    assert dict(results["status"]) == {"france": "pass", "spain": "fail"}
    figures = {metric.label: metric.value for metric in opened.metric}
    assert (figures["In both"], figures["Same words"], figures["Score"]) == ("2", "2", "50.0%")

    course = open_page("evals", admin, tenant, suites_id=second["suite_id"], runs_q="nobody")
    assert "Score over time, by revision" in words(course)
    [newest] = [row for row in records(course, "score") if "revision" in row]
    assert newest["revision"] == "only-base, revision 1"
    assert (newest["score"], newest["run"]) == ("50.0%", second["id"])

    fill(opened, new_schedule_name="nightly", new_schedule_cron="whenever")
    press(opened, "new_schedule_go")
    assert "cron" in words(opened)
    fill(opened, new_schedule_cron="0 3 * * *")
    press(opened, "new_schedule_go")
    schedules = admin.of_tenant(tenant["id"], "eval-schedules")
    [schedule] = schedules.page()["data"]
    switched = open_page("evals", admin, tenant, schedules_id=schedule["id"])
    press(switched, f"switch_{schedule['id']}")
    assert not schedules.get(schedule["id"])["is_enabled"]
    confirm(switched, f"delete_{schedule['id']}", "nightly")
    assert schedules.page()["data"] == []


def test_the_platforms_own_deployments_and_rollouts_are_the_operators(
    platform: Stand, admin: Api
) -> None:
    for path in ("deployments", "rollouts"):
        assert "The platform's own" in words(open_page(path, admin))
    member = platform.member(platform.tenant("no-operator")["id"], "owner")
    for path in ("deployments", "rollouts"):
        assert "The platform's own" not in words(open_page(path, member))


def test_models_and_engine_builds_are_listed(admin: Api) -> None:
    test = open_page("models", admin)

    assert len(table(test, "models") if table(test, "models") is not None else test.dataframe) >= 1
