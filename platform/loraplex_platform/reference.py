"""docs/reference.md: routes, commands, settings and checks, as the code has them.

    python -m loraplex_platform.reference            writes it
    python -m loraplex_platform.reference --check    exit code 1 if it is not what the code says

Nothing is started: the documents are those that `/openapi.json` of either API serves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from fastapi import FastAPI

_ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = _ROOT / "docs" / "reference.md"
_METHODS: Final = ("get", "post", "put", "patch", "delete")
_SECRET: Final = "of-no-process-0123456789abcdefghijkl"  # noqa: S105 - nothing is started with it

_HEAD: Final = """# Reference

Made by `python -m loraplex_platform.reference` from the code; a test keeps it current. Schemas and examples of every
route are at `<gateway>/docs` and `<control>/docs`, and as OpenAPI at `/openapi.json` of each.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(prog="python -m loraplex_platform.reference")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    is_check = parser.parse_args(arguments).check
    text = render()
    if not is_check:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{FILE} is not current: run python -m loraplex_platform.reference\n")
    return 1


def render() -> str:
    """The whole file."""
    parts = [
        _HEAD,
        "## Data plane\n",
        *_data_plane(),
        "\n## Control API\n",
        *_control_api(),
        "\n## Commands\n",
        *_commands(),
        "\n## Checks of `loraplex doctor`\n",
        *_checks(),
        "\n## Settings\n",
        *_settings(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _data_plane() -> Iterator[str]:
    from loraplex_platform.gateway.app import create_app
    from loraplex_platform.gateway.context import Gateway
    from loraplex_platform.gateway.metrics import GatewayMetrics

    stand_in = SimpleNamespace(
        settings=SimpleNamespace(max_body_bytes=1), metrics=GatewayMetrics(), failpoints=None
    )
    document = create_app(cast("Gateway", stand_in)).openapi()
    yield "| route | |"
    yield "|---|---|"
    for path, method, operation in _operations(document):
        yield f"| `{method.upper()} {path}` | {_line(operation)} |"


def control_document() -> dict[str, Any]:
    """The control API's OpenAPI document."""
    return dict(_control_app().openapi())


def _control_app() -> FastAPI:
    from loraplex_platform.control.app import create_app
    from loraplex_platform.settings import ControlSettings

    return create_app(
        ControlSettings.model_validate(
            {
                "database_url": "postgresql://nobody@nowhere/none",
                "model_dir": "/none",
                "key_pepper": _SECRET,
                "session_key": _SECRET,
                "admin_key": _SECRET,
                "store_url": "file:///none",
            }
        )
    )


def _control_api() -> Iterator[str]:
    app = _control_app()
    actions = _actions(app)
    yield "Who: tenant roles that may, besides platform admins (and, where a route only reads, platform viewers)."
    by_tag: dict[str, list[str]] = {}
    for path, method, operation in _operations(app.openapi()):
        tag = (operation.get("tags") or ["Other"])[0]
        queries = [
            f"`{parameter['name']}`"
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query"
        ]
        by_tag.setdefault(tag, []).append(
            f"| `{method.upper()} {path}` | {actions.get((method, path), '')} |"
            f" {_line(operation)} | {', '.join(queries)} |"
        )
    for tag, rows in by_tag.items():
        yield f"\n### {tag}\n"
        yield "| route | who | | query |"
        yield "|---|---|---|---|"
        yield from rows


def _actions(app: FastAPI) -> dict[tuple[str, str], str]:
    """(method, path) -> who may."""
    from loraplex_platform.control.permissions import action_of

    found = {}
    for one in app.routes:
        route: Any = one
        endpoint = getattr(route, "endpoint", None)
        action = None if endpoint is None else action_of(endpoint)
        if action is None:
            continue
        who = {"platform": "platform", "self": "yourself"}.get(action.kind)
        for method in getattr(route, "methods", ()) or ():
            found[method.lower(), route.path] = who or ", ".join(sorted(action.roles))
    return found


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method in methods:
                yield path, method, methods[method]


def _line(operation: dict[str, Any]) -> str:
    """The first sentence of what it does."""
    text = str(operation.get("description") or operation.get("summary") or "")
    return _cell(text.strip().split("\n\n")[0])


def _commands() -> Iterator[str]:
    import typer.main

    from loraplex_platform.cli import app

    yield "`loraplex COMMAND --help` has every flag and an example. Flags that are always there are left out here: `--json` on what lists or shows,"
    yield "`--data-dir` and `--control-url` on what asks a control API.\n"
    yield "| command | | flags |"
    yield "|---|---|---|"
    always = {"--json", "--data-dir", "--control-url", "--help"}
    for words, command in sorted(_walk(typer.main.get_command(app))):
        names = []
        for parameter in command.params:
            if getattr(parameter, "param_type_name", "") == "argument":
                names.append(str(parameter.name).upper())
        flags = [
            f"`{parameter.opts[0]}`"
            for parameter in command.params
            if parameter.opts[0].startswith("--") and parameter.opts[0] not in always
        ]
        first = (command.help or "").strip().split("\n\n")[0]
        yield f"| `{' '.join([*words, *names])}` | {_cell(first)} | {', '.join(flags)} |"


def _walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401 - typer's click
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, child in inner.items():
        yield from _walk(child, (*words, name))


def _checks() -> Iterator[str]:
    from loraplex_platform.doctor.run import all_checks

    yield "| check | what is right |"
    yield "|---|---|"
    for check in all_checks():
        yield f"| `{check.name}` | {check.title} |"


def _settings() -> Iterator[str]:
    from pydantic_core import PydanticUndefined
    from pydantic_settings import BaseSettings

    from loraplex_platform import settings

    processes: dict[str, type[BaseSettings]] = {
        "gateway": settings.GatewaySettings,
        "control": settings.ControlSettings,
        "worker": settings.WorkerSettings,
        "console": settings.ConsoleSettings,
        "migrate": settings.MigrationSettings,
    }
    users: dict[str, list[str]] = {}
    fields: dict[str, Any] = {}
    for process, kind in processes.items():
        for name, field in kind.model_fields.items():
            users.setdefault(name, []).append(process)
            fields[name] = field
    yield "Of the platform's processes; an engine's are its flags (`loraplex engine --help`), as `LORAPLEX_ENGINE_<FLAG>`. What is"
    yield "not set is looked for in `LORAPLEX_SECRETS_DIR`, as a file of that name in small letters.\n"
    yield "| variable | default | read by |"
    yield "|---|---|---|"
    for name in sorted(fields):
        default = fields[name].default
        shown = (
            "needed"
            if default is PydanticUndefined
            else ""
            if default in (None, "")
            else f"`{default}`"
        )
        yield f"| `LORAPLEX_{name.upper()}` | {shown} | {', '.join(users[name])} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
