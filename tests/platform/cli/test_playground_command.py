"""`loraplex playground` against control API and gateway as they run: side by side, piped, as JSON, refused, cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from tests.admin_ui.stand import ADAPTER_ANSWER, BASE_ANSWER, Stand, stand
from tests.platform.control.stand import ADMIN_KEY, BASE
from tests.platform.gateway import tiny_model
from tests.support.command_tree import invoke

QUESTION = "What is the capital of France?"

Ask = Callable[..., Result]


@pytest.fixture
def platform(
    _quiet_server: None, db_url: str, redis_url: str, short_tmp_path: Path
) -> Iterator[Stand]:
    with stand(db_url, redis_url, short_tmp_path) as made:
        tenant_id = made.tenant("acme")["id"]
        version = made.upload(tenant_id, "capitals", is_probed=False)["version"]["id"]
        made.deploy(tenant_id, "town", version)
        made.deploy(tenant_id, "town", None)
        yield made


@pytest.fixture
def ask(platform: Stand) -> Ask:
    env = {
        "LORAPLEX_CONTROL_URL": platform.control_url,
        "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
        "COLUMNS": "120",
    }

    def make(*arguments: str, prompt: str = QUESTION, **more: str) -> Result:
        return invoke(["playground", prompt, *arguments, "-t", "acme"], env | more)

    return make


def test_the_base_and_two_revisions_answer_the_same_prompt(platform: Stand, ask: Ask) -> None:
    piped = ask("town@1", "town")
    shown = ask("town@1", "town", FORCE_COLOR="1", NO_COLOR="1")
    answers = json.loads(ask("town@1", "--json").stdout)
    alone = ask("town@1", "--no-base")

    assert piped.exit_code == 0, piped.stderr
    assert piped.stdout.splitlines() == [
        f"base: {BASE_ANSWER}",
        f"town@1: {ADAPTER_ANSWER}",
        f"town: {BASE_ANSWER}",
    ]
    # The last picture at a terminal has each side's title, and what it took.
    for part in ("base", "town@1", "capital of France.", " tokens · ", "$0.0"):
        assert part in shown.stdout
    base, old = answers
    assert (base["asked"], base["model"], base["revision_id"]) == ("base", BASE, None)
    assert (old["model"], old["text"], old["finish_reason"]) == ("town", ADAPTER_ANSWER, "stop")
    assert old["revision_id"].startswith("rev_")
    assert old["usage"]["completion_tokens"] > 0
    assert float(old["cost_usd"]) > 0
    request = platform.http.get(f"/admin/v1/explain/{old['request_id']}").json()["answered_by"]
    assert request["revision"]["id"] == old["revision_id"]
    assert alone.stdout.splitlines() == [f"town@1: {ADAPTER_ANSWER}"]


def test_what_cannot_be_asked_is_said_and_the_exit_status_tells(platform: Stand, ask: Ask) -> None:
    unknown = ask("village")
    no_such = ask("town@9")
    too_many = ask("town", "town", "town")
    nobody = ask("--no-base")
    empty = ask(prompt=" ")
    platform.adapter_script = replace(platform.adapter_script, error_after=2)
    broken = ask("town@1")
    as_json = ask("town@1", "--json")

    assert unknown.exit_code == no_such.exit_code == 1
    assert "there is no revision 9" in no_such.stderr
    assert "village" in unknown.stderr
    for refused in (too_many, nobody, empty):
        assert refused.exit_code == 2
    # One that fails takes nobody with it.
    assert broken.exit_code == as_json.exit_code == 1
    assert broken.stdout == f"base: {BASE_ANSWER}\n"
    assert broken.stderr.startswith("town@1: ")
    assert [answer["error"] is None for answer in json.loads(as_json.stdout)] == [True, False]


def test_an_answer_cannot_tell_the_terminal_what_to_do(platform: Stand, ask: Ask) -> None:
    hostile = "a\x1b[2Jb[red]c"
    platform.base_script = replace(platform.base_script, token_ids=[*tiny_model.ids_of(hostile), 2])

    piped = ask()
    shown = ask(FORCE_COLOR="1", NO_COLOR="1")

    assert piped.stdout == "base: a\\x1b[2Jb[red]c\n"
    assert "a\\x1b[2Jb[red]c" in shown.stdout
