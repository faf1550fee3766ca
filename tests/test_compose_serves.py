"""What compose.yaml starts, serves: the same commands, environment and secrets, as plain processes.

Postgres is the tests' own, Redis is started by the script in compose.yaml. What needs Docker itself (networks,
capabilities, limits) is what `test_compose.py` reads.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import redis
import yaml
from loraplex_platform.deployment_secrets import make_secret_files
from loraplex_platform.local.embedded import _redis_binary
from loraplex_platform.variables import with_login
from prometheus_client.parser import text_string_to_metric_families

from tests.support.compose import ROOT, PlainServices, filled_in, free_port
from tests.support.folders import short_folder
from tests.support.processes import wait_until
from tests.support.tiny_fleet import write_adapters, write_model

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer

PORTS = ("8000", "8001", "8501", "9100", "9101", "6379")
SERVING = ("engine", "gateway", "control", "worker", "console")
START_DEADLINE_S = 240.0
ASK_EVERY_S = 0.5


class Stand:
    """The running services and where they answer."""

    def __init__(self, services: PlainServices, ports: dict[str, int], folder: Path) -> None:
        self.services = services
        self.ports = ports
        self.folder = folder

    def url(self, port: str, path: str = "") -> str:
        """What compose.yaml has at a port."""
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def loraplex(self, *words: str, service: str = "control") -> str:
        """`docker compose exec SERVICE loraplex WORDS`; what it prints."""
        done = self.services.run(service, *words, "--control-url", self.url("8001"))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def doctor(self, service: str, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """`docker compose exec SERVICE loraplex doctor`."""
        data_dir = str(self.folder / "none")
        done = self.services.run(service, "doctor", "--json", "--data-dir", data_dir, *flags)
        assert done.stdout, done.stderr
        checks = json.loads(done.stdout)["checks"]
        return done.returncode, {check["name"]: check for check in checks}


@pytest.fixture(scope="module")
def stand(postgres_server: PostgresServer) -> Iterator[Stand]:
    with short_folder() as folder, postgres_server.empty() as owner_url:
        ports = {port: free_port() for port in PORTS}
        compose = filled_in(
            {"LORAPLEX_ADMIN_EMAIL": "ada@example.com", "LORAPLEX_SECRETS": f"{folder}/secrets"}
        )
        make_secret_files(folder / "secrets", redis=f"127.0.0.1:{ports['6379']}")
        role = compose["services"]["migrate"]["environment"]["LORAPLEX_SERVE_ROLE"]
        # The tests' Postgres is on a socket, and lets the user who started it in under any name.
        for name, url in (
            ("loraplex_owner_database_url", owner_url),
            ("loraplex_database_url", with_login(owner_url, role)),
        ):
            (folder / "secrets" / name).unlink()
            (folder / "secrets" / name).write_text(url)
        services = PlainServices(compose, folder, ports)
        model = write_model(folder)
        model.rename(folder / "lib/models/smollm2-135m")
        redis_process = _start_redis(compose, folder, ports["6379"])
        stand = Stand(services, ports, folder)
        try:
            migrated = services.run("migrate")
            assert migrated.returncode == 0, migrated.stderr
            for name in SERVING:
                services.start(name)
            for name in SERVING:
                # Asking is a process of its own, as compose has it: no more often than is of use.
                wait_until(
                    partial(_is_healthy, stand, name),
                    deadline_s=START_DEADLINE_S,
                    interval_s=ASK_EVERY_S,
                )
            yield stand
        finally:
            services.close()
            redis_process.terminate()
            redis_process.wait()


def _start_redis(compose: dict[str, Any], folder: Path, port: int) -> subprocess.Popen[bytes]:
    """By the script of compose.yaml, on a port of ours."""
    service = compose["services"]["redis"]
    shell, flags, script = service["command"]
    tools = folder / "tools"
    tools.mkdir()
    (tools / "redis-server").symlink_to(_redis_binary())
    (folder / "redis").mkdir()
    script = (
        script.replace("/run/secrets", str(folder / "secrets"))
        .replace("exec redis-server", f"exec {tools}/redis-server")
        .replace("/run/redis", str(folder / "redis"))
    ).strip() + f" --port {port} --bind 127.0.0.1"
    env = {"PATH": os.defpath, **service["environment"]}
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen(
            [shell, flags, script], env=env, stdout=log, stderr=log, cwd=folder
        )
    password = (folder / "secrets/loraplex_redis_password").read_text().strip()
    client = redis.Redis(port=port, password=password)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    wait_until(answers)
    client.close()
    return process


def _is_healthy(stand: Stand, name: str) -> bool:
    for other in SERVING:
        assert stand.services.is_running(other), stand.services.log(other).read_text()[-3000:]
    return stand.services.health(name)


def _wait_for_engine(stand: Stand) -> None:
    def has_engine() -> bool:
        body = httpx.get(stand.url("8000", "/ready")).json()
        return bool(body["engines_ready"])

    wait_until(has_engine, deadline_s=60)


def test_the_main_job(stand: Stand) -> None:
    """A tenant, a key, an adapter, a deployment, an answer, a bill, and books that add up."""
    _wait_for_engine(stand)
    adapters = write_adapters(stand.folder / "adapters", stand.folder / "lib/models/smollm2-135m")

    stand.loraplex("tenants", "create", "acme")
    key = stand.loraplex("keys", "create", "laptop", "--tenant", "acme")
    stand.loraplex(
        *("adapters", "upload", str(adapters["one"]), "--tenant", "acme", "--name", "one"),
        "--no-probe",
    )
    stand.loraplex("adapters", "deploy", "one", "--tenant", "acme", "--version", "one")
    answer = httpx.post(
        stand.url("8000", "/v1/chat/completions"),
        headers={"authorization": f"Bearer {key.splitlines()[-1]}"},
        json={
            "model": "one",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 8,
            "temperature": 0,
        },
        timeout=120,
    )

    assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]
    assert used["completion_tokens"] >= 1

    report: dict[str, Any] = {}

    def has_landed() -> bool:
        report.update(json.loads(stand.services.run("worker", "reconcile", "--json").stdout))
        identity = report["identity"]
        return bool(report["ok"] and identity["billed"] and not identity["unlanded"])

    wait_until(has_landed, deadline_s=60, interval_s=ASK_EVERY_S)
    assert report["identity"]["billed"] == used["completion_tokens"]
    assert report["identity"]["difference"] == 0


def test_an_admin_logs_in_with_the_password_of_the_secret_file(stand: Stand) -> None:
    password = (stand.folder / "secrets/loraplex_admin_password").read_text().strip()

    right = httpx.post(
        stand.url("8001", "/admin/v1/sessions"),
        json={"email": "ada@example.com", "password": password},
        timeout=60,  # hashing it is meant to take long
    )
    wrong = httpx.post(
        stand.url("8001", "/admin/v1/sessions"),
        json={"email": "ada@example.com", "password": "another"},
        timeout=60,
    )

    assert right.is_success, right.text
    assert wrong.status_code == 401


def test_no_secret_is_in_a_process_s_environment_or_command_line(stand: Stand) -> None:
    values = {
        path.read_text().strip()
        for path in (stand.folder / "secrets").iterdir()
        if "url" not in path.name
    }

    for name in SERVING:
        pid = stand.services._running[name].pid
        seen = (Path(f"/proc/{pid}/environ").read_bytes()).decode(errors="replace")
        seen += (Path(f"/proc/{pid}/cmdline").read_bytes()).decode(errors="replace")
        assert "LORAPLEX_" in seen
        assert not any(value in seen for value in values), name


def exported(stand: Stand) -> dict[str, set[str]]:
    """Metric, as queries name it -> the labels that its samples have now."""
    found: dict[str, set[str]] = {}
    for port in ("9100", "8000", "9101"):
        text = httpx.get(stand.url(port, "/metrics")).raise_for_status().text
        for family in text_string_to_metric_families(text):
            names = {
                "counter": [f"{family.name}_total"],
                "histogram": [f"{family.name}_{part}" for part in ("bucket", "sum", "count")],
            }.get(family.type, [family.name])
            for name in names:
                found.setdefault(name, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    """Of the dashboard and of the alerts."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/loraplex.json").read_text())
    rules = yaml.safe_load((ROOT / "deploy/prometheus-rules.yml").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_ask_for_what_the_processes_export(stand: Stand) -> None:
    # The books are checked at the worker's start, and the outbox looked at soon after.
    wait_until(lambda: bool(exported(stand).get("loraplex:invariant_holds")), deadline_s=60)
    known = exported(stand)
    asked = queries()

    missing = {
        name
        for query in asked
        for name in re.findall(r'__name__="(loraplex:[a-z0-9_]+)"', query)
        if name not in known
    }
    assert missing == set()
    assert len(asked) > 30
    given = {"instance", "job", "le"}  # Prometheus's own, and a bucket's
    wrong = [
        (query, label)
        for query in asked
        for name in re.findall(r'__name__="(loraplex:[a-z0-9_]+)"', query)
        for labels in re.findall(r"\bby \(([a-z_, ]+)\)", query)
        for label in labels.replace(" ", "").split(",")
        if known[name] and label not in known[name] | given and query.count("__name__") == 1
    ]
    assert wrong == []


@pytest.mark.slow
def test_doctor_finds_the_fleet_well_and_names_what_dies(stand: Stand) -> None:
    _wait_for_engine(stand)
    # The worker checks the books at its start.
    wait_until(lambda: bool(exported(stand).get("loraplex:invariant_holds")), deadline_s=60)
    only = [word for name in ("database", "redis", "fleet", "books") for word in ("--only", name)]

    code, well = stand.doctor("gateway", *only)
    sick = {name: one["found"] for name, one in well.items() if one["status"] in ("warn", "fail")}
    assert (code, sick) == (0, {})
    assert well["fleet.engines"]["found"] == "ready: engine"
    control = stand.doctor("control", "--only", "fleet", "--only", "secrets", "--only", "store")[1]
    assert {one["status"] for one in control.values()} <= {"ok", "skipped"}, control
    assert control["fleet.console"]["status"] == control["secrets.strong"]["status"] == "ok"
    assert control["store.reachable"]["status"] == "ok"

    # Each process ends in order, within the patience that compose has, and the doctor says which.
    # Streamlit leaves SIGTERM to the system: it holds nothing that could be lost.
    assert stand.services.stop("console") in (0, -signal.SIGTERM)
    assert stand.services.stop("worker") == 0
    assert stand.services.stop("gateway") == 0
    assert stand.services.stop("engine") == 0
    dead = {
        "control": ("fleet.console", "fleet.engines"),
        "worker": ("fleet.worker",),
        "gateway": ("fleet.gateways",),
    }
    for service, names in dead.items():
        started = time.monotonic()
        flags = ["--strict", *(word for name in names for word in ("--only", name))]
        code, found = stand.doctor(service, *flags)
        assert {found[name]["status"] for name in names} <= {"fail", "warn"}, found
        assert (code, time.monotonic() - started < 60) == (1, True), found
    assert stand.services.stop("control") == 0
