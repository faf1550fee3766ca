"""The machine, broken in each way that a check knows: in processes that really have less."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loraplex_engine.config import DEFAULT_KV_MEMORY_BYTES, EngineConfig
from loraplex_platform.doctor import look, machine
from loraplex_platform.settings import GatewaySettings

from tests.platform.doctor.conftest import Ask
from tests.support.tiny_fleet import write_model


def doctor(
    tmp_path: Path, *arguments: str, before: str = "", **environment: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """`loraplex doctor --json` in a process of its own; exit code and checks by name."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    command = [sys.executable, "-m", "loraplex_platform.cli", "doctor", "--json"]
    command += ["--data-dir", str(tmp_path / "data"), *arguments]
    done = subprocess.run(
        ["/bin/bash", "-c", f'{before} exec "$@"', "bash", *command],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in report["checks"]}


def test_this_machine_is_well(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, "--only", "machine")

    sick = {name: one for name, one in found.items() if one["status"] == "fail"}
    assert (code, sick) == (0, {})
    assert found["machine.python"]["status"] == found["machine.torch"]["status"] == "ok"
    assert found["machine.kernels"]["found"].startswith("all 9")
    assert found["machine.cpu"]["status"] == "ok"
    # Nobody has tried it here, and no replica says so.
    assert found["machine.row_rule"]["status"] == "skipped"


def test_without_a_compiler_nor_its_cache_kernels_cannot_be_built(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    only = ("--only", "machine.compiler", "--only", "machine.kernels")

    code, found = doctor(
        tmp_path, *only, PATH=str(tools), LORAPLEX_CACHE_DIR=str(tmp_path / "cache")
    )

    assert code == 1
    assert found["machine.compiler"]["status"] == found["machine.kernels"]["status"] == "fail"
    assert "apt-get install gcc" in found["machine.compiler"]["remedy"]
    assert "no C compiler" in found["machine.kernels"]["found"]


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cc").write_text("#!/bin/sh\necho 'cannot find -lgomp' >&2; exit 1\n")
    (tools / "cc").chmod(0o755)
    cache = str(tmp_path / "cache")

    code, found = doctor(
        tmp_path,
        *("--only", "machine.kernels", "--only", "machine.compiler"),
        PATH=f"{tools}:{os.environ['PATH']}",
        LORAPLEX_CACHE_DIR=cache,
    )

    assert code == 1
    assert found["machine.compiler"]["status"] == "ok"
    assert "cannot find -lgomp" in found["machine.kernels"]["found"]


def test_a_torch_that_does_not_load(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.12: cannot open')\n")
    path = os.environ.get("PYTHONPATH", "")

    code, found = doctor(tmp_path, "--only", "machine.torch", PYTHONPATH=f"{broken.parent}:{path}")

    assert code == 1
    assert "libcudart.so.12: cannot open" in found["machine.torch"]["found"]
    assert found["machine.torch"]["remedy"] == "make venv"


@pytest.mark.parametrize(("version", "is_in_range"), [("2.13.0", True), ("2.4.1", False)])
def test_torch_must_be_of_our_range(version: str, is_in_range: bool) -> None:
    assert machine.requirement("torch").contains(version) is is_in_range


def test_the_pythons_that_we_support() -> None:
    assert [machine.judge_python((3, minor)).status for minor in (10, 11, 13, 14)] == [
        "fail",
        "ok",
        "ok",
        "fail",
    ]
    requires = Path(__file__).resolve().parents[3] / "pyproject.toml"
    first, beyond = machine.PYTHONS
    expected = f'requires-python = ">={first[0]}.{first[1]},<{beyond[0]}.{beyond[1]}"'
    assert expected in requires.read_text()


def test_a_cpu_without_avx2_is_warned_of() -> None:
    old = machine.judge_cpu("DEFAULT", ["fp32"], "float32", 4, is_gpu=False)
    new = machine.judge_cpu("AVX512", ["amx", "fp32"], "bfloat16", 4, is_gpu=False)

    assert (old.status, new.status) == ("warn", "ok")
    assert "products in fp32 only" in old.found


def test_what_the_self_check_says() -> None:
    facts = {"dtype": "bfloat16", "backends": {"attention": "native", "linear": "onednn"}}

    assert machine.judge_row_rule({"holds": True, **facts}).status == "ok"
    assert machine.judge_row_rule({"holds": False, **facts}).status == "warn"
    assert machine.judge_row_rule({"error": "ModelError: no weights"}).status == "fail"


@pytest.mark.slow
def test_the_self_check_tries_the_row_rule_of_a_model_here(tmp_path: Path) -> None:
    folder = write_model(tmp_path)

    code, found = doctor(
        tmp_path,
        *("--self-check", "--only", "machine.row_rule"),
        LORAPLEX_MODEL_DIR=str(folder),
    )

    assert code == 0
    assert found["machine.row_rule"]["status"] == "ok"
    assert "holds here" in found["machine.row_rule"]["found"]


# What an engine's image does not have: of the platform's packages, those that the engine does not bring.
NO_PLATFORM = """
import sys
ABSENT = {
    "alembic", "argon2", "cronsim", "cryptography", "fastapi", "fpdf", "jsonschema_rs", "jwt", "psycopg", "psycopg_pool",
    "pydantic_settings", "re2", "sqlalchemy", "starlette", "streamlit", "uvicorn",
}
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
"""


def test_where_only_an_engine_is_installed_its_part_is_looked_at(
    tmp_path: Path, redis_url: str
) -> None:
    # As `docker compose exec engine loraplex doctor`.
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NO_PLATFORM)
    folder = write_model(tmp_path)

    code, found = doctor(
        tmp_path,
        PYTHONPATH=f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}",
        LORAPLEX_ENGINE_MODEL_DIR=str(folder),
        LORAPLEX_ENGINE_REDIS_URL=redis_url,
        LORAPLEX_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",
    )

    assert {found[f"machine.{name}"]["status"] for name in ("torch", "kernels", "memory")} == {"ok"}
    assert found["model.files"]["status"] == found["redis.reachable"]["status"] == "ok"
    for name in ("database.reachable", "database.schema", "books.outbox"):
        assert found[name]["status"] == "skipped"
        assert "is not installed here" in found[name]["found"]
    assert (code, [n for n, one in found.items() if "itself failed" in one["found"]]) == (0, [])


async def test_a_kv_cache_that_no_machine_holds(ask: Ask, tmp_path: Path) -> None:
    model = {"LORAPLEX_MODEL_DIR": str(write_model(tmp_path))}
    fits = await ask("machine.memory", **model)
    large = await ask(
        "machine.memory", engine={"LORAPLEX_ENGINE_KV_MEMORY_BYTES": str(10**15)}, **model
    )
    adapters = await ask(
        "machine.memory", engine={"LORAPLEX_ENGINE_MAX_CPU_LORA_BYTES": str(10**15)}, **model
    )
    blocks = await ask(
        "machine.memory", engine={"LORAPLEX_ENGINE_NUM_BLOCKS": str(10**12)}, **model
    )

    assert [one.status for one in (fits, large, adapters, blocks)] == ["ok", "fail", "warn", "fail"]
    assert large.remedy is not None
    assert "LORAPLEX_ENGINE_KV_MEMORY_BYTES" in large.remedy


def test_a_cgroups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{10 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{4 * 2**20}\n")
    (tmp_path / "memory.stat").write_text("anon 5\n")

    # Also where it does not say whose processes it holds.
    assert machine.available_bytes(tmp_path) == 6 * 2**20
    (tmp_path / "cgroup.procs").write_text("")
    assert machine.available_bytes(tmp_path) == 6 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(tmp_path) > 6 * 2**20


async def test_where_no_engine_can_be_its_memory_is_no_question(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `docker compose exec gateway loraplex doctor`: a container of 1 GiB, and no torch in it.
    container(tmp_path, monkeypatch, limit=2**30, used=2**28)
    model = {"LORAPLEX_MODEL_DIR": str(write_model(tmp_path))}
    engines = await ask("machine.memory", **model)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    gateways = await ask("machine.memory", **model)

    assert engines.status == "fail"
    assert gateways.status == "skipped"
    assert "engines run elsewhere" in gateways.found


async def test_what_a_running_engine_has_is_not_counted_against_it(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As `docker compose exec engine loraplex doctor`: most of the limit is the engine's own, or copies of files.
    model = {"LORAPLEX_MODEL_DIR": str(write_model(tmp_path))}
    limits = {
        "LORAPLEX_ENGINE_KV_MEMORY_BYTES": str(2**20),
        "LORAPLEX_ENGINE_MAX_CPU_LORA_BYTES": str(2**20),
    }
    container(tmp_path, monkeypatch, limit=2 * 2**30, used=2**31 - 2**20, files=2**20)
    without = await ask("machine.memory", engine=limits, **model)
    command = [sys.executable, "-c", ENGINE, "-m", machine.ENGINE_MODULE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - ends in a second
        assert process.stdout is not None
        process.stdout.readline()
        (machine.CGROUP / "cgroup.procs").write_text(f"1\n{process.pid}\n")
        beside = await ask("machine.memory", engine=limits, **model)
        process.kill()

    assert without.status == "fail"
    assert "2 MiB are available" in without.found
    assert beside.status == "ok"


# Takes more than the process of an engine with a tiny model.
ENGINE = (
    "x = bytearray(b'x') * 1_600_000_000; print('there', flush=True); import time; time.sleep(60)"
)


def container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, limit: int, used: int, files: int = 0
) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.max").write_text(f"{limit}\n")
    (cgroup / "cgroup.procs").write_text("")  # whatever else runs on this machine is not in it
    (cgroup / "memory.current").write_text(f"{used}\n")
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {files}\nactive_file 0\n")
    monkeypatch.setattr(machine, "CGROUP", cgroup)


def test_defaults_are_the_engines_and_the_gateways() -> None:
    fields = EngineConfig.__dataclass_fields__

    assert DEFAULT_KV_MEMORY_BYTES == machine.DEFAULT_KV_BYTES
    assert fields["max_cpu_lora_bytes"].default == machine.DEFAULT_ADAPTER_BYTES
    assert GatewaySettings.model_fields["spool_max_bytes"].default == machine.DEFAULT_SPOOL_BYTES


async def test_a_disk_that_cannot_hold_what_the_spool_may_grow_to(ask: Ask, tmp_path: Path) -> None:
    spool = {"LORAPLEX_SPOOL_DIR": str(tmp_path / "spool")}

    fits = await ask("machine.disk", **spool)
    full = await ask("machine.disk", LORAPLEX_SPOOL_MAX_BYTES=str(10**16), **spool)

    assert fits.status in ("ok", "warn")
    assert full.status == "fail"
    assert "spool" in full.found
    assert full.remedy is not None
    assert "LORAPLEX_SPOOL_MAX_BYTES" in full.remedy


def test_few_file_descriptors(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > 300

    few = doctor(tmp_path, "--only", "machine.descriptors", before="ulimit -Sn 300;")
    strict = doctor(
        tmp_path, "--only", "machine.descriptors", "--strict", before="ulimit -Sn 2000;"
    )

    assert (few[0], few[1]["machine.descriptors"]["status"]) == (1, "fail")
    assert (strict[0], strict[1]["machine.descriptors"]["status"]) == (1, "warn")
    assert "ulimit -n" in few[1]["machine.descriptors"]["remedy"]


async def test_a_port_that_somebody_else_has(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "HTTP_TIMEOUT_S", 0.3)  # it listens, and says nothing
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        others = {"LORAPLEX_CONTROL_PORT": "0", "LORAPLEX_CONSOLE_PORT": "0"}

        taken = await ask("machine.ports", LORAPLEX_GATEWAY_PORT=port, **others)

    free = await ask("machine.ports", LORAPLEX_GATEWAY_PORT=port, **others)
    assert taken.status == "fail"
    assert f"port {port} for the gateway is taken" in taken.found
    assert str(os.getpid()) in taken.found
    assert (free.status, free.found) == ("ok", f"free: gateway {port}")


def test_a_wrong_name_is_wrong_usage_and_says_which_there_are(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loraplex_platform.cli", "doctor", "--only", "databse"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "no check databse: groups are machine, redis" in done.stderr


def test_the_report_for_people_tells_a_reason_once(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "loraplex_platform.cli", "doctor"),
            *("--only", "database", "--only", "machine.python", "--data-dir", str(tmp_path / "no")),
        ],
        env=clean | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert done.stdout.count("LORAPLEX_DATABASE_URL is not set") == 1
    assert done.stdout.splitlines()[-1] == "0 fail, 0 warn, 1 ok, 6 skipped."
