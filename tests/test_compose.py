"""compose.yaml: no default secrets, little published, and every command is one that exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml
from loraplex_engine.server_cli import read_options
from loraplex_platform.cli import app
from loraplex_platform.control import main as control_main
from loraplex_platform.gateway import main as gateway_main
from loraplex_platform.gateway.books import SETTLE_WAIT_S
from loraplex_platform.gateway.pump import ABORT_ANSWER_S
from loraplex_platform.local import services
from loraplex_platform.settings import (
    ConsoleSettings,
    ControlSettings,
    GatewaySettings,
    MigrationSettings,
    WorkerSettings,
)
from loraplex_platform.tenancy.keys import mint
from pydantic_settings import BaseSettings

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z_]+)(:[-?])?([^}]*)\}")
OURS = ("migrate", "engine", "gateway", "control", "worker", "console", "model")
SETTINGS: dict[str, type[BaseSettings]] = {
    "migrate": MigrationSettings,
    "gateway": GatewaySettings,
    "control": ControlSettings,
    "worker": WorkerSettings,
    "console": ConsoleSettings,
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


def filled_in(compose: dict[str, Any], service: str) -> dict[str, str]:
    """The service's environment once .env is filled in with secrets of one's own."""

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        if kind == ":-":
            return default
        if name == "LORAPLEX_ADMIN_EMAIL":
            return "ada@example.com"
        return mint("ak").secret if name == "LORAPLEX_ADMIN_KEY" else f"{name}-0123456789abcdefghij"

    environment = compose["services"][service].get("environment") or {}
    return {name: VARIABLE.sub(value, str(text)) for name, text in environment.items()}


def test_all_the_services_are_there(compose: dict[str, Any]) -> None:
    always = {name for name, service in compose["services"].items() if "profiles" not in service}

    assert always == {"postgres", "redis", *OURS}
    assert {
        name
        for name, service in compose["services"].items()
        if service.get("profiles") == ["monitoring"]
    } == {"prometheus", "grafana"}


def test_only_gateway_and_console_are_published_and_on_loopback(compose: dict[str, Any]) -> None:
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if service.get("ports")
    }

    assert set(published) == {"gateway", "console"}
    for ports in published.values():
        assert [VARIABLE.sub(lambda match: match[3], port).split(":")[0] for port in ports] == [
            "127.0.0.1"
        ]


def test_every_secret_is_required_and_listed_in_the_example(compose: dict[str, Any]) -> None:
    text = (ROOT / "compose.yaml").read_text()
    variables = {match[1]: match[2] for match in VARIABLE.finditer(text)}
    secret_names = {name for name in variables if re.search("PASSWORD|PEPPER|KEY", name)}
    example = dict(
        line.split("=", 1)
        for line in (ROOT / "deploy" / "compose.env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )

    assert len(secret_names) == 10
    assert {variables[name] for name in secret_names} == {":?"}
    assert example == dict.fromkeys({*secret_names, "LORAPLEX_ADMIN_EMAIL"}, "")
    # No value stands in the file itself.
    for service in compose["services"].values():
        for name, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|PEPPER|_KEY$|AUTH$", name):
                assert VARIABLE.fullmatch(str(value)), name


@pytest.mark.parametrize("service", OURS)
def test_every_command_is_one_of_ours(compose: dict[str, Any], service: str) -> None:
    command = [str(part) for part in compose["services"][service]["command"]]
    group = typer.main.get_command(app)

    context = group.make_context("loraplex", list(command), resilient_parsing=False)
    name, found, rest = group.resolve_command(context, context._protected_args + context.args)
    if name == "models":
        inner = found.make_context("models", rest, parent=context)
        name, found, rest = found.resolve_command(inner, inner._protected_args + inner.args)
        context = inner

    assert name == ("pull" if service == "model" else service)
    found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("service", sorted(SETTINGS))
def test_a_filled_in_environment_is_what_the_process_needs(
    compose: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = filled_in(compose, service)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    settings = SETTINGS[service]()

    known = {f"LORAPLEX_{name.upper()}" for name in type(settings).model_fields}
    # A misspelt variable would be ignored in silence.
    assert set(environment) <= known


def test_a_tool_format_in_the_env_file_reaches_the_gateway(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = compose["services"]["gateway"]["environment"]["LORAPLEX_TOOL_FORMAT"]
    found = VARIABLE.fullmatch(text)
    assert found is not None
    name, kind, default = found.groups()
    for key, value in filled_in(compose, "gateway").items():
        monkeypatch.setenv(key, value)

    assert (name, kind) == ("LORAPLEX_TOOL_FORMAT", ":-")
    assert GatewaySettings().tool_format == default == "auto"


@pytest.mark.parametrize("service", ["gateway", "control", "worker"])
def test_no_serving_process_has_the_owners_login(compose: dict[str, Any], service: str) -> None:
    migrate, serving = filled_in(compose, "migrate"), filled_in(compose, service)
    owner, login = (urlsplit(env["LORAPLEX_DATABASE_URL"]) for env in (migrate, serving))

    assert (login.username, login.password) == (
        migrate["LORAPLEX_SERVE_ROLE"],
        migrate["LORAPLEX_SERVE_PASSWORD"],
    )
    assert login.username != owner.username
    assert owner.password not in serving.values()


def test_the_engine_gets_what_it_needs_and_listens_on_the_shared_socket(
    compose: dict[str, Any],
) -> None:
    service = compose["services"]["engine"]

    _, config, options = read_options(
        [str(part) for part in service["command"][1:]], filled_in(compose, "engine")
    )

    folder = options.address.removeprefix("ipc://").rsplit("/", 1)[0]
    for name in ("engine", "gateway", "control", "worker"):
        assert f"run:{folder}" in compose["services"][name]["volumes"]
    assert options.redis_url is not None
    assert str(config.model_dir) == filled_in(compose, "gateway")["LORAPLEX_MODEL_DIR"]
    assert config.store_url == filled_in(compose, "control")["LORAPLEX_STORE_URL"]


@pytest.mark.parametrize("service", ["postgres", "redis", *OURS])
def test_nothing_of_ours_gains_privileges(compose: dict[str, Any], service: str) -> None:
    found = compose["services"][service]

    assert "no-new-privileges:true" in found["security_opt"]
    assert found["cap_drop"] == ["ALL"]


def test_redis_is_not_root_and_its_password_is_on_no_command_line(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    service = compose["services"]["redis"]
    shell, flags, script = service["command"]
    folder = service["tmpfs"][0].split(":")[0]
    # The same script, with a server that only shows what it was given.
    (tmp_path / "redis-server").write_text('#!/bin/sh\necho "$0 $*"; cat "$1"; stat -c %a "$1"\n')
    (tmp_path / "redis-server").chmod(0o755)

    told = subprocess.run(
        [shell, flags, script.replace("$$", "$").replace(folder, str(tmp_path))],
        env={"PATH": f"{tmp_path}:{os.defpath}", "REDISCLI_AUTH": "a-secret"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert service["user"] == "redis"
    command, *lines = told.stdout.splitlines()
    assert "a-secret" not in command
    assert lines == ["requirepass a-secret", 'save ""', "appendonly no", "600"]


def test_each_process_has_only_its_own_secrets(compose: dict[str, Any]) -> None:
    def holders(name: str) -> set[str]:
        return {s for s in compose["services"] if name in filled_in(compose, s)}

    assert holders("LORAPLEX_SALT_KEY") == {"gateway"}
    assert holders("LORAPLEX_SESSION_KEY") == holders("LORAPLEX_ADMIN_KEY") == {"control"}
    assert holders("LORAPLEX_KEY_PEPPER") == {"gateway", "control"}
    assert holders("LORAPLEX_WEBHOOK_KEY") == {"control", "worker"}


def test_stopping_waits_as_long_as_draining_takes(compose: dict[str, Any]) -> None:
    def grace_s(service: str) -> int:
        return int(compose["services"][service]["stop_grace_period"].removesuffix("s"))

    after_grace_s = ABORT_ANSWER_S + SETTLE_WAIT_S + gateway_main._CLOSE_S
    drain_s = GatewaySettings.model_fields["drain_grace_s"].default

    assert grace_s("gateway") > drain_s + after_grace_s + 5
    assert grace_s("control") > control_main.DRAIN_S + 5
    assert after_grace_s < services.DRAIN_END_S


def test_every_long_running_service_has_a_health_check(compose: dict[str, Any]) -> None:
    without = {
        name
        for name, service in compose["services"].items()
        if "healthcheck" not in service and "profiles" not in service
    }

    assert without == {"model", "migrate"}


def test_every_volume_and_anchor_that_is_used_is_declared(compose: dict[str, Any]) -> None:
    used = {
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if not volume.startswith(".")
    }
    mounted = [
        ROOT / volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]

    assert used == set(compose["volumes"])
    assert all(path.exists() for path in mounted)


def test_dashboards_and_alerts_name_metrics_that_exist() -> None:
    sources = [
        path.read_text() for root in ("engine", "platform") for path in (ROOT / root).rglob("*.py")
    ]
    defined = set(re.findall(r'"loraplex:([a-z0-9_]+)"', "".join(sources)))
    # The engine's state metrics are named where they are read.
    told = r'self\._(?:gauge|counter|histogram)\(\s*"([a-z0-9_]+)"'
    defined |= set(re.findall(told, "".join(sources)))
    dashboard = (ROOT / "deploy/grafana/dashboards/loraplex.json").read_text()
    rules = (ROOT / "deploy/prometheus-rules.yml").read_text()
    json.loads(dashboard)
    yaml.safe_load(rules)

    named = set(re.findall(r"loraplex:([a-z0-9_]+)", dashboard + rules))

    assert len(named) > 10
    unknown = {
        name
        for name in named
        if not {name, re.sub(r"_(total|bucket|count|sum)$", "", name)} & defined
    }
    assert unknown == set()
