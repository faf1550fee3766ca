"""Starting, stopping and killing `loraplex up` itself, on a tiny model."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, kill_leftovers
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until


@pytest.fixture
def own_fleet(short_tmp_path: Path, tiny_model: Path) -> Iterator[Fleet]:
    fleet = Fleet(short_tmp_path / "data", "--model", str(tiny_model))
    yield fleet
    kill_leftovers(fleet)


@pytest.mark.slow
def test_a_life_of_a_data_directory(own_fleet: Fleet) -> None:
    """One long story, because each start costs seconds: start, refuse, stop, kill, start again."""
    own_fleet.start()
    with own_fleet.admin() as admin:
        tenant = admin.create_tenant("acme", "Acme")
        secret = admin.create_key(tenant["id"], "kept")["secret"]
    first_secrets = (own_fleet.data_dir / "secrets.json").read_text()
    admin_key = json.loads(first_secrets)["admin_key"]

    # Nothing that it printed or that others could read is a secret.
    assert admin_key not in own_fleet.output
    for path in own_fleet.data_dir.rglob("*.json"):
        if "postgres" not in path.parts:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for path in (own_fleet.data_dir / "logs").iterdir():
        assert admin_key not in path.read_text()
        assert secret not in path.read_text()
    assert stat.S_IMODE(own_fleet.data_dir.stat().st_mode) & 0o066 == 0

    # A second one on the same directory is refused and disturbs nothing.
    second = subprocess.run(own_fleet.command, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"in use by `loraplex up` with pid {own_fleet.pid}" in second.stderr
    assert own_fleet.state == json.loads((own_fleet.data_dir / "state.json").read_text())

    # SIGTERM drains and leaves no process.
    assert own_fleet.stop() == 0
    assert own_fleet.processes() == []
    assert not (own_fleet.data_dir / "state.json").exists()

    # The same directory again has the same data and the same secrets.
    own_fleet.start()
    assert (own_fleet.data_dir / "secrets.json").read_text() == first_secrets
    with own_fleet.admin() as admin:
        found = admin.tenant("acme")
        assert found["id"] == tenant["id"]
        assert [key["name"] for key in admin.keys(found["id"])] == ["kept"]

    # kill -9 of the supervisor takes all that it started with it and blocks nothing.
    assert len(own_fleet.processes()) > 8  # Postgres and Redis among them
    own_fleet.stop(signal.SIGKILL)
    wait_until(lambda: own_fleet.processes() == [], deadline_s=60)
    own_fleet.start()
    with own_fleet.admin() as admin:
        assert admin.tenant("acme")["id"] == tenant["id"]
    own_fleet.check_books()

    # Ctrl-C does what SIGTERM does, and a second one does it at once.
    process = own_fleet.process
    assert process is not None
    num_stops = own_fleet.output.count("Stopping")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: own_fleet.output.count("Stopping") > num_stops)
    assert own_fleet.stop(signal.SIGINT) == 0
    assert own_fleet.processes() == []


@pytest.mark.slow
def test_a_postgres_and_a_redis_of_your_own_serve_as_well(
    short_tmp_path: Path, tiny_model: Path, postgres_server: PostgresServer, redis_url: str
) -> None:
    with postgres_server.empty() as database_url:
        stores = ("--database-url", database_url, "--redis-url", redis_url)
        fleet = Fleet(short_tmp_path / "data", "--model", str(tiny_model), *stores)
        try:
            fleet.start()

            with fleet.admin() as admin:
                assert admin.create_tenant("acme", "Acme")["slug"] == "acme"
            assert fleet.service_pid("postgres") is None
            assert fleet.service_pid("redis") is None
            assert fleet.engine_stats()["num_running"] == 0
            fleet.check_books()
            assert fleet.stop() == 0
            assert fleet.processes() == []
        finally:
            kill_leftovers(fleet)


def test_a_stop_in_the_middle_of_the_start_leaves_no_process(own_fleet: Fleet) -> None:
    with own_fleet.output_file.open("wb") as output:
        own_fleet.process = subprocess.Popen(own_fleet.command, stdout=output, stderr=output)
    wait_until(lambda: own_fleet.service_pid("engine") is not None, deadline_s=60)

    code = own_fleet.stop()

    assert code == 0, own_fleet.output
    assert own_fleet.processes() == []


def test_an_engine_that_cannot_start_is_shown_with_its_words(
    short_tmp_path: Path, tiny_model: Path
) -> None:
    broken = short_tmp_path / "broken"
    broken.mkdir()
    for path in tiny_model.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    fleet = Fleet(short_tmp_path / "data", "--model", str(broken))

    result = subprocess.run(fleet.command, capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert "engine ended with exit code" in result.stderr
    assert "logs/engine.log" in result.stderr
    assert "Unheard" in result.stdout
    assert fleet.processes() == []
