"""Checks of the machine: Python, torch, compiler, kernels, CPU, memory, disk, descriptors, ports."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loraplex_engine.artifact import ModelShape, base_memory, kv_bytes_per_token
from loraplex_engine.artifact.sizes import BYTES_OF_DTYPE, PROCESS_BYTES, Quantization
from loraplex_engine.errors import ModelError

from loraplex_platform.doctor.findings import (
    Catalogue,
    Finding,
    NotLookedAtError,
    fail,
    ok,
    warn,
)
from loraplex_platform.doctor.look import DEFAULT_PORTS, Look

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

catalogue = Catalogue()

ENGINE_MODULE: Final = "loraplex_engine.server"  # that `loraplex engine` becomes
CGROUP: Final = Path("/sys/fs/cgroup")  # of a container, its own

PYTHONS: Final = ((3, 11), (3, 14))
_GIB: Final = 1024**3
_MIB: Final = 1024**2
FEW_FILES: Final = 1024
ENOUGH_FILES: Final = 4096
LITTLE_DISK_BYTES: Final = 2 * _GIB
NO_DISK_BYTES: Final = 256 * _MIB
# As `EngineConfig`, which the platform does not import; a test compares them.
DEFAULT_KV_BYTES: Final = 512 * _MIB
DEFAULT_ADAPTER_BYTES: Final = _GIB
DEFAULT_SPOOL_BYTES: Final = 64 * _MIB


@catalogue.check("machine.python", "Python is a version that we support")
async def python(look: Look) -> Finding:
    del look
    return judge_python((sys.version_info.major, sys.version_info.minor))


def judge_python(version: tuple[int, int]) -> Finding:
    """Whether we run on it."""
    first, beyond = PYTHONS
    found = f"{version[0]}.{version[1]} at {sys.executable}"
    if first <= version < beyond:
        return ok(found)
    return fail(
        found,
        f"make venv PYTHON=python3.12 (from {first[0]}.{first[1]} to before {beyond[0]}.{beyond[1]})",
    )


@catalogue.check("machine.torch", "torch is there, in a version that we support")
async def torch(look: Look) -> Finding:
    found = await look.inspection()
    if "torch_error" in found:
        return fail(f"torch cannot be used: {found['torch_error']}", "make venv")
    needed = requirement("torch")
    version = str(found["torch"])
    if not needed.contains(version.partition("+")[0], prereleases=True):
        return fail(f"{version}, and we need {needed}", "make venv")
    if found["gpu_error"] is not None:
        return warn(f"{version}; {found['gpu_error']}", "pip install 'loraplex[gpu]'")
    gpu = found["gpu"]
    return ok(f"{version}, {'no GPU' if gpu is None else gpu['name'] + ' ' + gpu['isa']}")


def requirement(package: str) -> SpecifierSet:
    """Which versions of a package our own metadata asks for."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    for text in requires("loraplex") or []:
        named = Requirement(text)
        if named.name == package:
            return named.specifier
    raise LookupError(f"loraplex does not name {package}")


@catalogue.check("machine.compiler", "a C compiler is there, for the CPU kernels")
async def compiler(look: Look) -> Finding:
    inspected = await look.inspection()
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is not None:
        return ok(found)
    if inspected.get("gpu"):
        return ok("none, and a GPU's engine needs none")
    return fail(
        "no cc, gcc or clang on PATH: engines fall back to torch's routines, several times slower",
        "apt-get install gcc libc6-dev libgomp1",
    )


@catalogue.check("machine.kernels", "the native kernels are built for this CPU")
async def kernels(look: Look) -> Finding:
    found = _inspected(await look.inspection())
    failed = found["kernels_failed"]
    if not failed:
        return ok(f"all {len(found['kernels_built'])}: {', '.join(found['kernels_built'])}")
    name, reason = next(iter(failed.items()))
    text = f"{len(failed)} of {len(failed) + len(found['kernels_built'])} do not build; {name}: {' '.join(reason.split())}"
    if found["gpu"]:
        return warn(text, "apt-get install gcc libc6-dev libgomp1 (only for engines on the CPU)")
    return fail(
        text,
        "apt-get install --reinstall gcc libc6-dev libgomp1, then loraplex doctor --only machine.kernels",
    )


@catalogue.check("machine.cpu", "the CPU has what the kernels are fast on")
async def cpu(look: Look) -> Finding:
    found = _inspected(await look.inspection())
    return judge_cpu(
        str(found["cpu_capability"]),
        [str(name) for name in found["arithmetics"]],
        str(found["dtype_auto"]),
        int(found["num_cpus"]),
        is_gpu=bool(found["gpu"]),
    )


def judge_cpu(
    capability: str, arithmetics: list[str], dtype: str, num_cpus: int, *, is_gpu: bool
) -> Finding:
    """What this CPU computes with."""
    products = [name for name in arithmetics if name != "fp32"] or ["fp32 only"]
    text = (
        f"{num_cpus} usable, {capability}, products in {', '.join(products)}, dtype auto is {dtype}"
    )
    if capability in ("DEFAULT", "NO AVX") and not is_gpu:
        return warn(
            text,
            "use a machine with AVX2 or newer; bf16 needs AVX512-BF16 or AMX (grep -o -m1 'avx2' /proc/cpuinfo)",
        )
    return ok(text)


@catalogue.check("machine.row_rule", "a row's bits depend on nothing but its request")
async def row_rule(look: Look) -> Finding:
    tried = (await look.inspection()).get("row_rule")
    if tried is not None:
        return judge_row_rule(tried)
    from loraplex_platform.doctor.fleet import replica_records

    records = await replica_records(look) or []
    broken = [record.replica_id for record in records if not record.row_rule_holds]
    if broken:
        return warn(
            f"it does not hold, or is not promised, on {', '.join(broken)}",
            "loraplex engine --batch-invariant (on a GPU); on a CPU: loraplex doctor --self-check, there",
        )
    if records:
        return ok(f"holds on {', '.join(record.replica_id for record in records)}")
    raise NotLookedAtError("no replica says so yet; `loraplex doctor --self-check` tries it here")


def judge_row_rule(tried: dict[str, object]) -> Finding:
    """What the self-check said."""
    if "error" in tried:
        return fail(f"the model could not be loaded: {tried['error']}", "loraplex models pull NAME")
    backends = tried["backends"]
    assert isinstance(backends, dict)  # noqa: S101 - our own JSON
    text = f"{tried['dtype']}, attention {backends['attention']}, linear {backends['linear']}"
    if tried["holds"]:
        return ok(f"holds here: {text}")
    return warn(
        f"does not hold here: {text}",
        "make venv (another build of torch may keep it), or loraplex engine --batch-invariant on a GPU",
    )


@catalogue.check("machine.memory", "model, KV cache and adapters fit into memory")
async def memory(look: Look) -> Finding:
    look.need_torch()
    config_file = look.model_dir / "config.json"
    if not config_file.is_file():
        raise NotLookedAtError(f"there is no {config_file}: see model.files")
    import json

    try:
        shape = ModelShape.from_config_json(config_file)
        raw = json.loads(config_file.read_text(encoding="utf-8"))
    except (ModelError, ValueError) as error:
        raise NotLookedAtError(f"{error}: see model.files") from None
    needed = _memory_needed(
        look, shape, str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    )
    total = sum(needed.values())
    available = available_bytes()
    parts = ", ".join(f"{name} {_size(size)}" for name, size in needed.items())
    text = f"an engine needs up to {_size(total)} ({parts}); {_size(available)} are available"
    if look.is_running:
        # It has what it needs, or it would not run.
        return (
            ok(f"an engine takes up to {_size(total)} ({parts}) and runs")
            if available
            else ok(text)
        )
    if available < total - needed["adapters"]:
        return fail(
            text,
            "set LORAPLEX_ENGINE_KV_MEMORY_BYTES lower, or LORAPLEX_ENGINE_QUANTIZATION=int8, or take a"
            " larger machine (loraplex plan says how large)",
        )
    if available < total:
        return warn(text, "set LORAPLEX_ENGINE_MAX_CPU_LORA_BYTES lower, or take a larger machine")
    return ok(text)


def _memory_needed(look: Look, shape: ModelShape, stored_dtype: str) -> dict[str, int]:
    def number(name: str, default: int) -> int:
        text = look.engine_variables.get(f"LORAPLEX_ENGINE_{name}", "")
        return int(text) if text.isdigit() else default

    quantization: Quantization = "none"
    given = look.engine_variables.get("LORAPLEX_ENGINE_QUANTIZATION", "none")
    if given == "int8":
        quantization = "int8"
    elif given == "int4":
        quantization = "int4"
    base = base_memory(
        shape,
        stored_dtype=stored_dtype if stored_dtype in BYTES_OF_DTYPE else "float32",
        quantization=quantization,
    )
    one = kv_bytes_per_token(
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, number_bytes=2
    )
    blocks = number("NUM_BLOCKS", 0) * number("BLOCK_SIZE", 16) * one * shape.num_layers
    return {
        "weights": base.total,
        "KV cache": blocks or number("KV_MEMORY_BYTES", DEFAULT_KV_BYTES),
        "adapters": number("MAX_CPU_LORA_BYTES", DEFAULT_ADAPTER_BYTES),
        "the process": PROCESS_BYTES,
    }


def available_bytes(cgroup: Path | None = None) -> int:
    """What an engine may take here: the machine's, or its cgroup's where that is less. One that runs has it already."""
    import psutil

    cgroup = cgroup or CGROUP
    available = int(psutil.virtual_memory().available) + _held_by_an_engine()
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().split("\n")
        sizes = dict(line.split(" ", 1) for line in lines if " " in line)
        # Copies of files, such as the weights': they make room, as those that `available` leaves out.
        used -= sum(int(sizes.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    # An engine of another container has nothing of this one's.
    held = _held_by_an_engine(_processes_of(cgroup))
    return min(available, max(0, int(limit) - used + held))


def _processes_of(cgroup: Path) -> frozenset[int]:
    """None where that cannot be read, as of threads' cgroups: its limit counts all the same."""
    try:
        return frozenset(map(int, (cgroup / "cgroup.procs").read_text().split()))
    except (OSError, ValueError):
        return frozenset()


def _held_by_an_engine(among: Collection[int] | None = None) -> int:
    """Memory of its own of the largest engine that is to be seen from here. `among`: these processes."""
    import psutil

    largest = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (among is None or process.pid in among) and ENGINE_MODULE in process.cmdline():
                found = process.memory_info()
                largest = max(largest, found.rss - found.shared)
    return largest


@catalogue.check("machine.disk", "there is disk space for data, spool and cache")
async def disk(look: Look) -> Finding:
    from loraplex_platform.local.base_model import cache_dir

    spool_text = look.get("LORAPLEX_SPOOL_MAX_BYTES") or ""
    spool_bytes = int(spool_text) if spool_text.isdigit() else DEFAULT_SPOOL_BYTES
    folders = {"cache": (cache_dir(), 0), "data": (look.data_dir.root, 0)}
    spool = look.get("LORAPLEX_SPOOL_DIR")
    if spool is not None:
        folders["spool"] = (Path(spool), spool_bytes)
    store = look.get("LORAPLEX_STORE_URL")
    if store is not None and store.startswith("file:///"):
        folders["store"] = (Path(store.removeprefix("file://")), 0)
    texts, little = [], []
    for name, (folder, needed) in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        texts.append(f"{name} {_size(free)} free ({folder})")
        if free < max(needed, NO_DISK_BYTES):
            return fail(
                f"{name}: {_size(free)} free in {folder}, {_size(max(needed, NO_DISK_BYTES))} needed",
                f"free some: du -xh -d2 {existing} | sort -h | tail"
                + ("; or lower LORAPLEX_SPOOL_MAX_BYTES" if needed > NO_DISK_BYTES else ""),
            )
        if free < LITTLE_DISK_BYTES:
            little.append(f"{name} {folder}")
    if little:
        return warn(
            "; ".join(texts), f"free some, soon: du -xh -d2 {little[0].split(' ', 1)[1]} | sort -h"
        )
    return ok("; ".join(texts))


@catalogue.check("machine.descriptors", "a process may open enough files and connections")
async def descriptors(look: Look) -> Finding:
    del look
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (at most {hard})"
    remedy = f"ulimit -n {ENOUGH_FILES * 16} (systemd: LimitNOFILE=; compose: ulimits.nofile)"
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return ok(text)
    if soft <= FEW_FILES:
        return fail(f"{text}: a stream needs one, and so does each connection", remedy)
    return warn(text, remedy)


@catalogue.check("machine.ports", "the ports are free, or ours")
async def ports(look: Look) -> Finding:
    from loraplex_platform.local.errors import LocalModeError
    from loraplex_platform.local.ports import settle_port

    if look.is_running:
        return ok("the fleet listens on them")
    taken, free = [], []
    for process, default in DEFAULT_PORTS.items():
        text = look.get(f"LORAPLEX_{process.upper()}_PORT") or ""
        port = int(text) if text.isdigit() else default
        host = look.get(f"LORAPLEX_{process.upper()}_HOST") or "127.0.0.1"
        if port == 0 or await _is_ours(look, process):
            continue
        try:
            settle_port(host, port, purpose=process, flag=f"--{process}-port")
            free.append(f"{process} {port}")
        except LocalModeError as error:
            taken.append(str(error))
    if taken:
        return fail(
            "; ".join(taken),
            "ss -ltnp, and end what listens there; or loraplex up --gateway-port 0",
        )
    return ok(f"free: {', '.join(free)}" if free else "taken by our own processes")


async def _is_ours(look: Look, process: str) -> bool:
    """Whether what answers there is the process itself."""
    url = look.url_of(process)
    if url is None:
        return False
    path = "/_stcore/health" if process == "console" else "/live"
    try:
        status, _ = await look.ask(url + path)
    except OSError:
        return False
    return status == 200


def _inspected(found: dict[str, Any]) -> dict[str, Any]:
    if "torch_error" in found:
        raise NotLookedAtError("torch cannot be used: see machine.torch")
    return found


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:,.1f} GiB"
    return f"{num_bytes / _MIB:,.0f} MiB"
