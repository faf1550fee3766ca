"""Schemas and grammars are checked in a thread, and a check that crashes is neither a 500 nor silent."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import structlog
from loraplex_platform.gateway import structure

from tests.platform.gateway.stand import BASE, Stand

pytestmark = pytest.mark.asyncio(loop_scope="package")

_CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}]}
_COMPLETION = {"model": BASE, "prompt": "x"}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_REQUESTS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat/completions",
        {**_CHAT, "response_format": _FORMAT},
        "output_grammar",
        "response_format",
    ),
    ("chat/completions", {**_CHAT, "tools": [_TOOL]}, "plan_tools", "tools"),
    (
        "chat/completions",
        {**_CHAT, "structured_outputs": {"regex": "a"}},
        "output_grammar",
        "structured_outputs",
    ),
    (
        "completions",
        {**_COMPLETION, "structured_outputs": {"json": {}}},
        "output_grammar",
        "structured_outputs",
    ),
]


@pytest.mark.parametrize(("path", "body", "check", "param"), _REQUESTS)
async def test_a_check_that_crashes_is_a_400_that_names_the_field_and_an_error_in_the_log(
    path: str,
    body: dict[str, Any],
    check: str,
    param: str,
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def crash(*_: object) -> None:
        threads.append(threading.current_thread())
        raise OverflowError("secret words of the client")

    monkeypatch.setattr(structure, check, crash)

    with structlog.testing.capture_logs() as logs:
        answer = await stand.http().post(f"/v1/{path}", json=body)

    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("grammar_unchecked", param)
    assert stand.generated == []
    (crashed,) = [line for line in logs if line["event"] == "grammar_check_crashed"]
    assert (crashed["log_level"], crashed["error"]) == ("error", "OverflowError")
    assert any("crash" in frame for frame in crashed["trace"])
    assert "secret" not in answer.text + str(logs)
    # However small the body: a schema of a kilobyte may take a while.
    assert threads[0] is not threading.main_thread()
