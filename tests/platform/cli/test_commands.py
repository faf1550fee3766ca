"""The command line: quick, helpful, and never a traceback for what a person can cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from loraplex_engine.server_cli import read_options
from loraplex_platform.cli import adapter_commands
from loraplex_platform.cli.options import ToolFormat
from loraplex_platform.local import up
from loraplex_platform.settings import ToolFormatName
from loraplex_platform.tenancy.keys import parse

from tests.support.command_tree import invoke


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    names = [name for name in os.environ if name.startswith("LORAPLEX_")]
    result = invoke(arguments, {**dict.fromkeys(names), **environment, "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from loraplex_platform.cli import app; "
        "print([n for n in ('torch', 'numpy', 'httpx', 'sqlalchemy', 'pydantic', 'fastapi', "
        "'psycopg', 'redis', 'asyncio') if n in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


def test_a_missing_secret_is_named_and_stops_the_start() -> None:
    code, _, errors = run(
        "gateway", LORAPLEX_DATABASE_URL="postgresql://x@/y", LORAPLEX_KEY_PEPPER="too short"
    )

    assert code == 2
    assert "LORAPLEX_SALT_KEY: Field required" in errors
    assert "LORAPLEX_KEY_PEPPER: must be at least 32 random characters" in errors
    assert "too short" not in errors


def test_a_database_that_is_not_there_is_a_sentence(short_tmp_path: Path) -> None:
    code, _, errors = run(
        "migrate", LORAPLEX_DATABASE_URL=f"postgresql://postgres@/x?host={short_tmp_path}"
    )

    assert code == 1
    assert errors.startswith("Error: ")
    assert "Traceback" not in errors


def test_demo_refuses_to_be_reached_by_others(tmp_path: Path) -> None:
    code, _, errors = run("up", "--demo", "--host", "0.0.0.0", "--data-dir", str(tmp_path / "data"))

    assert code == 1
    assert "--force-unsafe-demo" in errors
    assert not (tmp_path / "data").exists()


def test_a_model_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    ports = ("--gateway-port", "0", "--control-port", "0", "--no-console")
    code, _, errors = run(
        "up", "--model", str(tmp_path), "--data-dir", str(tmp_path / "data"), *ports
    )

    assert code == 1
    assert "is not a Hugging Face model folder" in errors


def test_up_takes_the_tool_formats_that_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[up.UpOptions] = []
    monkeypatch.setattr(up, "run_up", lambda options, console: seen.append(options) or 0)
    folder = ("--data-dir", str(tmp_path / "data"))

    assert run("up", *folder)[0] == 0
    assert run("up", "--tool-format", "llama", *folder, LORAPLEX_TOOL_FORMAT="hermes")[0] == 0
    assert run("up", *folder, LORAPLEX_TOOL_FORMAT="mistral")[0] == 0
    code, _, errors = run("up", "--tool-format", "pythonic", *folder)

    assert [options.tool_format for options in seen] == [None, "llama", "mistral"]
    assert code == 2
    assert "--tool-format" in errors
    assert "'auto', 'hermes', 'llama', 'mistral'" in errors
    assert get_args(ToolFormat) == get_args(ToolFormatName)


def test_up_hands_the_engine_s_flags_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[up.UpOptions] = []
    monkeypatch.setattr(up, "run_up", lambda options, console: seen.append(options) or 0)
    folder = ("--data-dir", str(tmp_path / "data"))
    flags = ("--dtype", "bfloat16", "--kv-cache-dtype", "int8", "--max-loras", "3")

    assert run("up", *folder)[0] == 0
    assert run("up", *flags, *folder)[0] == 0

    assert [options.engine_flags for options in seen] == [(), flags]
    usual = ("--model-dir", "/m", "--journal-dir", "/j", "--address", "ipc:///x")
    _, config, _ = read_options([*usual, *flags], {})
    assert (config.dtype, config.kv_cache_dtype, config.max_loras) == ("bfloat16", "int8", 3)


@pytest.mark.parametrize("command", ["demo", "verify"])
def test_what_needs_a_running_demo_says_how_to_start_one(command: str, tmp_path: Path) -> None:
    code, _, errors = run(command, "--data-dir", str(tmp_path))

    assert code == 1
    assert "make up" in errors


def test_a_demo_file_of_a_run_that_is_gone_is_not_believed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    content = json.dumps({"pid": gone.pid, "tenants": [], "base_model": "x"})
    (tmp_path / "demo.json").write_text(content)
    (tmp_path / "state.json").write_text(content)

    code, _, errors = run("verify", "--data-dir", str(tmp_path))

    assert code == 1
    assert "no demo runs on" in errors


def test_the_admin_commands_say_how_to_reach_a_fleet(tmp_path: Path) -> None:
    no_fleet = run("adapters", "list", "-t", "acme", "--data-dir", str(tmp_path))
    no_key = run("adapters", "list", "-t", "acme", "--control-url", "http://127.0.0.1:9")
    no_answer = run(
        *("adapters", "list", "-t", "acme", "--control-url", "http://127.0.0.1:9"),
        LORAPLEX_ADMIN_KEY="lpx_ak_x",
    )

    assert "start one with `loraplex up`" in no_fleet[2]
    assert "set LORAPLEX_ADMIN_KEY" in no_key[2]
    assert "cannot be reached" in no_answer[2]
    assert {no_fleet[0], no_key[0], no_answer[0]} == {1}


def test_an_upload_of_something_else_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    code, _, errors = run("adapters", "upload", str(tmp_path), "-t", "acme")

    assert code == 1
    assert "has no adapter_config.json" in errors


def test_merge_becomes_the_engines_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is not loaded here."""
    calls: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        adapter_commands, "exec_module", lambda module, arguments: calls.append((module, arguments))
    )

    code, _, _ = run("adapters", "merge", "a", "--model", "m", "--out", "o", "--force")

    assert code == 0
    assert calls == [("loraplex_engine.merge", ["a", "--model", "m", "--out", "o", "--force"])]


def test_a_minted_admin_key_is_a_good_one() -> None:
    code, output, _ = run("keys", "mint-admin")

    assert code == 0
    assert parse(output.strip()).kind == "ak"
