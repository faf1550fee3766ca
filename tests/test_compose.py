"""compose.yaml: no default secrets, little published, and every command is one that exists.

That the whole of it serves is `test_compose_serves.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main
import yaml
from loraplex_engine.errors import ConfigError
from loraplex_engine.server_cli import read_options, with_secret_files
from loraplex_platform.cli import app
from loraplex_platform.control import main as control_main
from loraplex_platform.deployment_secrets import SecretsFolderError, make_secret_files
from loraplex_platform.gateway import main as gateway_main
from loraplex_platform.gateway.books import SETTLE_WAIT_S
from loraplex_platform.gateway.pump import ABORT_ANSWER_S
from loraplex_platform.local import services
from loraplex_platform.settings import (
    ConsoleSettings,
    ControlSettings,
    DatabaseSettings,
    GatewaySettings,
    MigrationSettings,
    WorkerSettings,
)
from loraplex_platform.variables import read_variable
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from tests.support.compose import (
    VARIABLE,
    MissingVariableError,
    RefusedError,
    configured,
    filled_in,
    secrets_of,
)

ROOT = Path(__file__).resolve().parents[1]
OURS = ("migrate", "engine", "engine-gpu", "gateway", "control", "worker", "console", "model")
THEIRS = ("postgres", "redis", "prometheus", "grafana")
ENGINES = ("engine", "engine-gpu")
SETTINGS: dict[str, type[BaseSettings]] = {
    "migrate": MigrationSettings,
    "gateway": GatewaySettings,
    "control": ControlSettings,
    "worker": WorkerSettings,
    "console": ConsoleSettings,
}
ENV = {"LORAPLEX_ADMIN_EMAIL": "ada@example.com"}


@pytest.fixture(scope="module")
def secrets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `loraplex secrets make` makes it."""
    folder = tmp_path_factory.mktemp("compose") / "secrets"
    make_secret_files(folder)
    return folder


@pytest.fixture(scope="module")
def compose(secrets_folder: Path) -> dict[str, Any]:
    """compose.yaml with a filled-in .env."""
    return filled_in(ENV | {"LORAPLEX_SECRETS": str(secrets_folder)})


def told(
    compose: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> dict[str, str]:
    """Put the service's environment and secrets in place; the variables that it then knows."""
    environment = {
        name: str(value)
        for name, value in compose["services"][service].get("environment", {}).items()
    }
    folder.mkdir(exist_ok=True)
    files = {}
    for file, secret in secrets_of(compose["services"][service]).items():
        text = Path(compose["secrets"][secret]["file"]).read_text()
        (folder / file).write_text(text)
        files[file.upper()] = text.strip()
    if "LORAPLEX_SECRETS_DIR" in environment:
        environment["LORAPLEX_SECRETS_DIR"] = str(folder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment | files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What docs/operator.md has one do: copy the example, and fill in the one line that it asks for."""
    folder = tmp_path / "loraplex"
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    shutil.copy(ROOT / "compose.yaml", folder)
    example = (folder / "deploy/compose.env.example").read_text()
    (folder / ".env").write_text(
        example.replace("LORAPLEX_ADMIN_EMAIL=\n", "LORAPLEX_ADMIN_EMAIL=ada@example.com\n")
    )
    return folder


def test_docker_compose_takes_it_with_the_example_filled_in(project: Path) -> None:
    found = configured(project)

    always = {*OURS, *THEIRS} - {"engine", "engine-gpu", "prometheus", "grafana"}
    assert set(found["services"]) == always | {"engine"}
    # What the other tests read is what Docker Compose makes of the file.
    read = filled_in(ENV)
    for name, service in found["services"].items():
        ours = read["services"][name]
        assert service.get("environment", {}) == {
            key: str(value) for key, value in ours.get("environment", {}).items()
        }
        assert service.get("command") == ours.get("command"), name
        assert secrets_of(service) == secrets_of(ours), name
        assert set(service["networks"]) == set(ours["networks"]), name
        assert service.get("healthcheck", {}).get("test") == ours.get("healthcheck", {}).get("test")
    for name, secret in found["secrets"].items():
        assert secret["file"] == str(project / "secrets" / name)


@pytest.mark.parametrize(
    ("profiles", "more"),
    [
        ("gpu", {"engine-gpu"}),
        ("cpu,monitoring", {"engine", "prometheus", "grafana"}),
    ],
)
def test_profiles_say_what_runs_beside_the_rest(
    project: Path, profiles: str, more: set[str]
) -> None:
    env = project / ".env"
    env.write_text(env.read_text().replace("PROFILES=cpu\n", f"PROFILES={profiles}\n"))

    found = configured(project)

    optional = {"engine", "engine-gpu", "prometheus", "grafana"}
    assert set(found["services"]) & optional == more
    # As compose.yaml says in its head: with the second file Grafana is reached on loopback.
    over = ("-f", "compose.yaml", "-f", "deploy/compose.grafana.yaml", "--profile", "monitoring")
    (port,) = configured(project, *over)["services"]["grafana"]["ports"]
    assert (port["host_ip"], port["published"]) == ("127.0.0.1", "3000")


def test_docker_compose_refuses_what_is_wrong(project: Path) -> None:
    file = project / "compose.yaml"
    right = file.read_text()
    found = {}
    for was, now in (
        ("    healthcheck:\n", "    helthcheck:\n"),
        ("memory: 4g", "memory: much"),
        ("migrate: { condition: service_completed_successfully }", "migrat: {}"),
        ("- spool:/var/lib", "- spol:/var/lib"),
    ):
        assert was in right
        file.write_text(right.replace(was, now, 1))
        with pytest.raises(RefusedError) as refused:
            configured(project)
        found[now] = str(refused.value)

    assert all(found.values()), found


def test_without_the_admins_address_nothing_starts(project: Path) -> None:
    shutil.copy(project / "deploy/compose.env.example", project / ".env")

    with pytest.raises(RefusedError, match=r"LORAPLEX_ADMIN_EMAIL .*see deploy/compose\.env"):
        configured(project)
    with pytest.raises(
        MissingVariableError, match=r"LORAPLEX_ADMIN_EMAIL: see deploy/compose\.env"
    ):
        filled_in({})


def test_all_the_services_are_there_and_profiles_choose(compose: dict[str, Any]) -> None:
    profiles = {
        name: tuple(service.get("profiles", ())) for name, service in compose["services"].items()
    }

    assert set(profiles) == {*OURS, *THEIRS}
    assert {name: found for name, found in profiles.items() if found} == {
        "engine": ("cpu",),
        "engine-gpu": ("gpu",),
        "prometheus": ("monitoring",),
        "grafana": ("monitoring",),
    }


def test_only_gateway_and_console_are_published_and_on_loopback(compose: dict[str, Any]) -> None:
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if service.get("ports")
    }

    assert set(published) == {"gateway", "console"}
    for ports in published.values():
        assert [port.split(":")[0] for port in ports] == ["127.0.0.1"]
    for name, service in compose["services"].items():
        if name not in {"gateway", "console", "model"}:
            assert service["networks"] == ["internal"], name
    assert compose["networks"]["internal"]["internal"] is True


def test_every_secret_is_a_file_that_is_made_and_none_is_in_an_environment(
    compose: dict[str, Any], secrets_folder: Path
) -> None:
    text = (ROOT / "compose.yaml").read_text()
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    values = {path.name: path.read_text().strip() for path in secrets_folder.iterdir()}

    assert set(compose["secrets"]) == set(values)
    for name, secret in compose["secrets"].items():
        assert Path(secret["file"]).name == name
        assert len(values[name]) >= 32
    used = {
        source
        for service in compose["services"].values()
        for source in secrets_of(service).values()
    }
    assert used == set(values)
    environments = json.dumps([s.get("environment") for s in compose["services"].values()])
    commands = json.dumps([s.get("command") for s in compose["services"].values()])
    for value in values.values():
        assert value not in environments + commands
    assert not re.search(r"(PASSWORD|KEY|PEPPER): ", text)
    # What is filled in by hand is one line, and no secret.
    asked = [line for line in example.splitlines() if re.fullmatch(r"[A-Z_]+=", line)]
    assert asked == ["LORAPLEX_ADMIN_EMAIL="]


def test_every_variable_is_in_the_example(compose: dict[str, Any]) -> None:
    named = {match[1] for match in VARIABLE.finditer((ROOT / "compose.yaml").read_text())}
    example = (ROOT / "deploy" / "compose.env.example").read_text()
    missing = {name for name in named if f"{name}=" not in example}

    assert compose
    # Sizes of what rarely needs another one are read where they are used.
    assert {name for name in missing if not re.search("_(CPUS|MEMORY|KEEP)$", name)} == set()


def test_secret_files_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    first = make_secret_files(folder)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    (folder / "loraplex_salt_key").unlink()
    second = make_secret_files(folder)
    after = {path.name: path.read_text() for path in folder.iterdir()}

    assert len(first.made) == len(before) == 13
    assert second.made == ("loraplex_salt_key",)
    assert {n for n in before if before[n] != after[n]} == {"loraplex_salt_key"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}
    assert len(set(after.values())) == 13
    (folder / "loraplex_redis_password").unlink()
    with pytest.raises(SecretsFolderError, match="loraplex_redis_url does not hold the password"):
        make_secret_files(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(SecretsFolderError, match="give a folder that you own"):
        make_secret_files(tmp_path / "file")


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

    assert name == {"model": "pull", "engine-gpu": "engine"}.get(service, service)
    found.make_context(name, rest, parent=context)


@pytest.mark.parametrize("service", sorted(SETTINGS))
def test_a_filled_in_environment_is_what_the_process_needs(
    compose: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = told(compose, service, monkeypatch, tmp_path / "run")

    settings = SETTINGS[service]()

    known = {f"LORAPLEX_{name.upper()}" for name in type(settings).model_fields}
    # A misspelt variable, or a file of another name, would be ignored in silence.
    assert set(given) <= known
    for name, value in given.items():
        found = getattr(settings, name.removeprefix("LORAPLEX_").lower())
        shown = found.get_secret_value() if hasattr(found, "get_secret_value") else found
        assert shown == value or str(shown) == value or shown == int(value), name


def test_what_is_set_wins_over_a_file_and_a_file_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loraplex_database_url").write_text("postgresql://file\n")
    monkeypatch.setenv("LORAPLEX_SECRETS_DIR", str(tmp_path))

    from_file = DatabaseSettings()
    monkeypatch.setenv("LORAPLEX_DATABASE_URL", "postgresql://set")
    from_environment = DatabaseSettings()
    assert read_variable("LORAPLEX_DATABASE_URL") == "postgresql://set"
    monkeypatch.delenv("LORAPLEX_DATABASE_URL")
    (tmp_path / "loraplex_database_url").unlink()

    assert from_file.database_url.get_secret_value() == "postgresql://file"
    assert from_environment.database_url.get_secret_value() == "postgresql://set"
    with pytest.raises(ValidationError, match="database_url"):
        DatabaseSettings()
    assert read_variable("LORAPLEX_DATABASE_URL") is None


def test_a_tool_format_in_the_env_file_reaches_the_gateway() -> None:
    def environment(**variables: str) -> Any:
        return filled_in(ENV | variables)["services"]["gateway"]["environment"]

    assert environment()["LORAPLEX_TOOL_FORMAT"] == "auto"
    assert environment(LORAPLEX_TOOL_FORMAT="llama")["LORAPLEX_TOOL_FORMAT"] == "llama"


@pytest.mark.parametrize("service", ["gateway", "control", "worker", "engine", "engine-gpu"])
def test_no_serving_process_has_the_owners_login(compose: dict[str, Any], service: str) -> None:
    def url_of(name: str) -> str:
        secret = secrets_of(compose["services"][name])["loraplex_database_url"]
        return Path(compose["secrets"][secret]["file"]).read_text()

    owner = urlsplit(url_of("migrate"))
    mounted = {
        Path(compose["secrets"][secret]["file"]).read_text().strip()
        for secret in secrets_of(compose["services"][service]).values()
    }

    assert not any((owner.password or "?") in text for text in mounted)
    if service not in ENGINES:
        login = urlsplit(url_of(service))
        migrate = compose["services"]["migrate"]["environment"]
        assert login.username == migrate["LORAPLEX_SERVE_ROLE"] != owner.username
        assert login.password in {
            Path(compose["secrets"]["loraplex_serve_password"]["file"]).read_text().strip()
        }
    else:
        assert "loraplex_database_url" not in secrets_of(compose["services"][service])


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_gets_what_it_needs_and_listens_on_the_shared_socket(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = compose["services"][name]
    told(compose, name, monkeypatch, tmp_path / "run")

    _, config, options = read_options(
        [str(part) for part in service["command"][1:]], with_secret_files(os.environ)
    )

    folder = options.address.removeprefix("ipc://").rsplit("/", 1)[0]
    for other in (name, "gateway", "control", "worker"):
        assert f"run:{folder}" in compose["services"][other]["volumes"]
    assert (
        options.redis_url
        == Path(compose["secrets"]["loraplex_redis_url"]["file"]).read_text().strip()
    )
    gateway = compose["services"]["gateway"]["environment"]
    assert str(config.model_dir) == gateway["LORAPLEX_MODEL_DIR"]
    control = compose["services"]["control"]["environment"]
    assert config.store_url == control["LORAPLEX_STORE_URL"]
    assert config.device == ("cuda" if name == "engine-gpu" else "cpu")
    if name == "engine-gpu":
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert config.batch_invariant


def test_an_engine_says_when_its_folder_of_secrets_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LORAPLEX_SECRETS_DIR is .*no such folder"):
        with_secret_files({"LORAPLEX_SECRETS_DIR": str(tmp_path / "none")})


@pytest.mark.parametrize("service", [*OURS, *THEIRS])
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
    (tmp_path / "loraplex_redis_password").write_text("a-secret\n")

    told = subprocess.run(
        [
            shell,
            flags,
            script.replace(folder, str(tmp_path)).replace("/run/secrets", str(tmp_path)),
        ],
        env={"PATH": f"{tmp_path}:{os.defpath}", **service["environment"]},
        capture_output=True,
        text=True,
        check=True,
    )

    assert service["user"] == "redis"
    command, *lines = told.stdout.splitlines()
    assert "a-secret" not in command
    assert lines == [
        "requirepass a-secret",
        'save ""',
        "appendonly no",
        "maxmemory 384mb",
        "maxmemory-policy noeviction",
        "600",
    ]


def test_each_process_has_only_its_own_secrets(compose: dict[str, Any]) -> None:
    def holders(name: str) -> set[str]:
        return {
            service
            for service, found in compose["services"].items()
            if name in secrets_of(found).values()
        }

    assert holders("loraplex_salt_key") == {"gateway"}
    assert holders("loraplex_session_key") == holders("loraplex_admin_key") == {"control"}
    assert holders("loraplex_admin_password") == {"control"}
    assert holders("loraplex_key_pepper") == {"gateway", "control"}
    assert holders("loraplex_webhook_key") == {"control", "worker"}
    assert (
        holders("loraplex_owner_database_url") == holders("loraplex_serve_password") == {"migrate"}
    )
    assert holders("loraplex_postgres_password") == {"postgres"}
    assert holders("loraplex_redis_password") == {"redis"}
    assert holders("loraplex_grafana_password") == {"grafana"}
    assert secrets_of(compose["services"]["console"]) == {}


def test_stopping_waits_as_long_as_draining_takes(compose: dict[str, Any]) -> None:
    def grace_s(service: str) -> int:
        return int(compose["services"][service]["stop_grace_period"].removesuffix("s"))

    after_grace_s = ABORT_ANSWER_S + SETTLE_WAIT_S + gateway_main._CLOSE_S
    drain_s = GatewaySettings.model_fields["drain_grace_s"].default

    assert grace_s("gateway") > drain_s + after_grace_s + 5
    assert grace_s("control") > control_main.DRAIN_S + 5
    assert after_grace_s < services.DRAIN_END_S


def test_every_service_has_a_health_check_limits_and_a_restart_policy(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        is_task = name in {"model", "migrate"}
        assert service["restart"] == ("no" if is_task else "unless-stopped"), name
        assert ("healthcheck" in service) is not is_task, name
        limits = service["deploy"]["resources"]["limits"]
        assert float(limits["cpus"]) > 0, name
        assert re.fullmatch(r"\d+[mg]", limits["memory"]), name
        assert limits["pids"] >= 64, name
        # A log fills no disk.
        assert service["logging"]["options"]["max-size"], name


def test_redis_has_room_for_what_it_may_use(compose: dict[str, Any]) -> None:
    limit = compose["services"]["redis"]["deploy"]["resources"]["limits"]["memory"]
    most = compose["services"]["redis"]["environment"]["MAXMEMORY"]

    assert int(most.removesuffix("mb")) <= 0.8 * int(limit.removesuffix("m"))


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


def test_grafana_finds_its_source_and_our_dashboard(compose: dict[str, Any]) -> None:
    mounts = dict(
        volume.split(":")[:2]
        for volume in compose["services"]["grafana"]["volumes"]
        if volume.startswith(".")
    )
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards/loraplex.yaml").read_text())[
        "providers"
    ]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/loraplex.json").read_text())

    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert urlsplit(source["url"]).hostname in compose["services"]
    panels = dashboard["panels"]
    sources = {panel["datasource"]["uid"] for panel in panels if "datasource" in panel}
    assert sources <= {source["uid"], "${datasource}"}
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_prometheus_scrapes_services_that_there_are(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    targets = []
    for job in config["scrape_configs"]:
        for static in job.get("static_configs", ()):
            targets += [target.split(":") for target in static["targets"]]
        for dns in job.get("dns_sd_configs", ()):
            targets += [[name, str(dns["port"])] for name in dns["names"]]

    ports = {
        "engine": "9100",
        "engine-gpu": "9100",
        "gateway": compose["services"]["gateway"]["environment"]["LORAPLEX_GATEWAY_PORT"],
        "worker": compose["services"]["worker"]["environment"]["LORAPLEX_WORKER_PORT"],
    }
    assert dict(targets) == ports
    engine = compose["services"]["engine"]["environment"]
    assert engine["LORAPLEX_ENGINE_METRICS_PORT"] == ports["engine"]
