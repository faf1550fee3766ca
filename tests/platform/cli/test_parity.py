"""Whatever the control API can do, a command does; and what a command prints for programs is JSON.

Every command runs against an API that answers each route of the control API's own document with a sample of what that
says. So a route that no command asks, and a command that cannot read an answer, are found without a list of either.
That a command does the right thing is tested with the real API, beside this file.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

import pytest
from loraplex_platform import reference
from typer.testing import Result

from tests.support.command_tree import COMMANDS, invoke, options_of
from tests.support.sample_api import TEXT, SampleApi

ADMIN = "/admin/v1"
ASKS = sorted(
    words for words, command in COMMANDS.items() if "--control-url" in options_of(command)
)
# What commands are given beyond what they cannot do without: each line once, and "" for nothing more.
MORE: dict[str, tuple[str, ...]] = {
    "adapters deploy": ("--base",),
    "audit verify": ("--against {folder}/heads.jsonl",),
    "deployments set": ("--base",),
    "eval list": ("suites", "runs --tenant 1", "schedules --tenant 1"),
    "eval run": ("--deployment 1",),
    "eval schedule create": ("--deployment 1 --every-hours 1",),
    "keys update": ("--name 1",),
    "limits set": ("--of platform --per total", "--of platform --per day --soft"),
    "prices preview": ("--start 2026-01-01T00:00Z --end 2026-02-01T00:00Z",),
    "prices set": ("--for any_base",),
    "retention": ("", "--set requests=100", "--apply"),
    "rollouts edit": ("--sticky-by key",),
    "invoices recipient": ("", "--legal-name 1"),
    "invoices save": ("--to {folder}/invoice.pdf", "--to {folder}/invoice.html"),
    "tenants delete": ("--confirm 1",),
    "tenants schedule": ("--priority 1",),
    "tenants update": ("--name 1",),
    "webhooks update": ("--description 1",),
    "usage": ("", "--csv", "--by model --start 2026-01-01 --end 2026-02-01 --model 1"),
}
# Arguments that are not just any text.
GIVEN = {
    "adapters upload folder": "{folder}/adapter",
    "eval list what": "",
    "eval import file": "{folder}/golden.jsonl",
    "eval record file": "{folder}/trace.jsonl",
    "webhooks switch state": "on",
    "limits set metric": "requests",
    "invoices save to": "",  # in MORE
    "prices preview start": "",
    "prices preview end": "",
    "prices set target": "",
}
# What the document calls just an object, or any text.
FIXED = {
    "steps": [{"kind": "canary", "weight_bp": 100, "hold_s": 60}] * 2,
    "code": "I10",
    "gates": [{"gate": "errors", "verdict": "pass", "summary": "fewer"}],
    "scope_id": None,
    "memory": None,
    "overhead": None,
    "window_hours": None,
    "valid_from": None,
}
# Commands whose exit code is an answer: what the sample's is.
ANSWERS = {"residency add": 1, "residency remove": 1, "audit verify": 1}
# What can be long, and is read as it comes.
LOGS = ("alerts", "audit list", "rollouts watch")
# (method, path without its head) of routes that no command asks, and why not.
NOT_BY_COMMAND = {
    ("GET", "/live"): "an orchestrator's",
    ("GET", "/ready"): "an orchestrator's, and the doctor's",
    ("GET", "/metrics"): "Prometheus's",
    ("GET", "/login"): "a browser's: a command has a key",
    ("POST", "/login"): "a browser's",
    ("POST", "/logout"): "a browser's",
    ("GET", "/login/oidc"): "a browser's",
    ("GET", "/login/oidc/callback"): "a browser's",
    ("GET", "/login/oidc/link"): "a browser's",
    ("POST", "/login/oidc/link"): "a browser's",
    ("GET", "/join"): "a browser's: by whom was invited",
    ("POST", "/join"): "a browser's: by whom was invited",
    ("POST", f"{ADMIN}/invitations/accept"): "by whom was invited, with a password of their own",
    ("POST", f"{ADMIN}/sessions"): "logging in: a command has a key",
    ("GET", f"{ADMIN}/sessions/current"): "who is logged in: a command has a key",
    ("DELETE", f"{ADMIN}/sessions/current"): "logging out: a command has a key",
    (
        "POST",
        f"{ADMIN}/invariants",
    ): "`loraplex reconcile` looks at the books itself, with more to say",
    ("POST", f"{ADMIN}/tenants/{{tenant_id}}/adapters"): (
        "all at once: `adapters upload` sends it in pieces, and goes on where it was cut"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    (folder / "adapter/adapter_model.safetensors").write_bytes(b"tensors")
    case = {"id": "a", "messages": [{"role": "user", "content": "?"}], "checks": []}
    (folder / "golden.jsonl").write_text(json.dumps(case) + "\n")
    (folder / "heads.jsonl").write_text(json.dumps({"id": "1", "seq": 1, "hash": "1"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Iterator[tuple[SampleApi, dict[str, Result]]]:
    """What became of every command: alone, for a tenant where that is a choice, and for programs."""
    env: dict[str, str | None] = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    results = {}
    # A client loads the system's certificates, which takes longer than the rest of a command.
    context = mock.patch(
        "httpx._transports.default.create_ssl_context", return_value=ssl.create_default_context()
    )
    with SampleApi(reference.control_document(), FIXED) as api, context:
        env |= {"LORAPLEX_CONTROL_URL": api.url, "LORAPLEX_ADMIN_KEY": "x", "COLUMNS": "200"}
        env |= {"XDG_STATE_HOME": str(folder)}
        for words in ASKS:
            for line in lines_of(words, folder):
                results[" ".join(line)] = invoke(line, env, text=f"{TEXT}\n")
        yield api, results


def lines_of(words: tuple[str, ...], folder: Path) -> Iterator[list[str]]:
    """A command as it is typed, in each way that may ask another route."""
    command = COMMANDS[words]
    name = " ".join(words)
    needed = [
        part
        for parameter in command.params
        if parameter.required
        for part in _typed(name, parameter, folder)
    ]
    is_for_any = any("--tenant" in one.opts and not one.required for one in command.params)
    for more in MORE.get(name, ("",)):
        line = [*words, *needed, *more.format(folder=folder).split()]
        yield line
        if is_for_any:
            yield [*line, "--tenant", TEXT]
        if "--json" in options_of(command) and "--csv" not in line:
            yield [*line, *(["--tenant", TEXT] if is_for_any else []), "--json"]


def _typed(name: str, parameter: Any, folder: Path) -> list[str]:
    kind = parameter.type_descriptor.annotation
    value = GIVEN.get(f"{name} {parameter.name}")
    if value == "":
        return []
    if value is None and get_origin(kind) is Literal:
        value = str(get_args(kind)[0])
    elif value is None and isinstance(kind, type) and issubclass(kind, Enum):
        value = str(next(iter(kind)).value)
    flag = [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
    return [*flag, (value or TEXT).format(folder=folder)]


def test_every_route_of_the_control_api_has_a_command(
    done: tuple[SampleApi, dict[str, Result]],
) -> None:
    api, _ = done

    shown = {
        (method, path)
        for method, path in api.routes - api.asked
        if method == "GET"
        and path.endswith("}")
        and ("GET", path.rpartition("/")[0]) in api.asked
        # One of a list that a command shows, with the same fields.
        and api.answer_of(method, path) == api.answer_of("GET", path.rpartition("/")[0], "data")
    }
    without = api.routes - api.asked - shown
    assert not without - NOT_BY_COMMAND.keys(), lines(without - NOT_BY_COMMAND.keys())
    # And the list is no longer than it must be.
    assert not NOT_BY_COMMAND.keys() - without, lines(NOT_BY_COMMAND.keys() - without)
    assert not api.unknown, lines(api.unknown)


def test_every_command_can_read_what_the_api_answers(
    done: tuple[SampleApi, dict[str, Result]],
) -> None:
    _, results = done

    failed = {
        f"{line} -> {result.exit_code} {result.exception!r} {result.output[-200:]!r}"
        for line, result in results.items()
        if result.exit_code != next((c for n, c in ANSWERS.items() if line.startswith(n)), 0)
        or not isinstance(result.exception, SystemExit | None)
    }
    assert not failed, lines(failed)


def test_what_is_printed_for_programs_is_json(done: tuple[SampleApi, dict[str, Result]]) -> None:
    _, results = done
    printed = {line: result.stdout for line, result in results.items() if line.endswith("--json")}

    assert len(printed) > 40
    broken = [
        line for line, text in printed.items() if not is_json(text, is_log=line.startswith(LOGS))
    ]
    assert not broken, lines(broken)


def lines(items: Iterable[object]) -> str:
    """So that all of them are seen where one fails."""
    return "\n".join(sorted(map(str, items)))


def is_json(text: str, *, is_log: bool) -> bool:
    """One document; of a log one a line."""
    try:
        return bool([json.loads(part) for part in (text.splitlines() if is_log else [text])])
    except ValueError:
        return False
