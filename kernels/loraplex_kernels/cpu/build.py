"""Compile a C file of this folder once and keep the library in a cache.

The name of the library is a hash of the source, the flags, the compiler and the CPU's features, so a
changed file, compiler or machine (a cache on a shared disk) never finds a stale one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any, Final

SOURCES: Final = Path(__file__).parent

# No -ffast-math, and no fusing that the source does not ask for: results must not depend on how the
# compiler happens to unroll a loop.
FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fopenmp",
    "-fvisibility=default",
    "-shared",
    "-fPIC",
)

# On a free core a compile takes seconds, but on a machine whose cores are all busy (a load of 10 on two)
# 120 s were not enough: the process then did without native kernels for as long as it lived. This is for a
# compiler that hangs.
COMPILE_TIMEOUT_S: Final = 600


class NativeBuildError(Exception):
    """There is no C compiler, or it cannot build the kernel for this CPU."""


def load_library(name: str, cache_dir: Path) -> ctypes.CDLL:
    """The library built from `<name>.c`, compiled now unless the cache has it.

    All libraries of a process share the threads of one pool.c. Import torch first: what packs weights at load then
    shares torch's OpenMP threads instead of starting its own.

    Raises:
        NativeBuildError: it cannot be built or loaded here; use the torch fallback.
    """
    _load_pool(cache_dir)
    return _load(name, cache_dir, ctypes.DEFAULT_MODE)


# Loaded once a process: a second pool would have threads of its own.
_pool_lock: Final = threading.Lock()
_pool: list[ctypes.CDLL] = []


def _load_pool(cache_dir: Path) -> None:
    """Make pool_run known to the libraries that are loaded from now on."""
    with _pool_lock:
        if not _pool:
            _pool.append(_load("pool", cache_dir, ctypes.RTLD_GLOBAL))


def _load(name: str, cache_dir: Path, mode: int) -> ctypes.CDLL:
    compiler, library = _library_path(name, cache_dir)
    try:
        if library.is_file():
            try:
                return ctypes.CDLL(str(library), mode=mode)
            except OSError:  # cut short, by a full disk or a lost machine: made anew
                library.unlink(missing_ok=True)
        _compile(compiler, SOURCES / f"{name}.c", library)
        return ctypes.CDLL(str(library), mode=mode)
    except OSError as error:
        raise NativeBuildError(f"cannot load {library.name}: {error}") from error


def address_of(function: Any) -> int:  # noqa: ANN401 -- ctypes has no type for what a library holds
    """Where a library's function lies, for another library to call."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def library_name(name: str) -> str | None:
    """The file name, which says all that decides its machine code; None without a compiler."""
    try:
        return _library_path(name, Path())[1].name
    except NativeBuildError:
        return None


def _library_path(name: str, cache_dir: Path) -> tuple[str, Path]:
    """The compiler, and where what it builds lies."""
    source = SOURCES / f"{name}.c"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeBuildError("no C compiler (cc, gcc or clang) on PATH")
    headers = sorted(SOURCES.glob("*.h"))
    code = b"".join(path.read_bytes() for path in (source, *headers))
    parts = (code, " ".join(FLAGS).encode(), _version(compiler), _cpu_features())
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    return compiler, cache_dir / f"{name}-{key[:32]}.so"


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(descriptor)
    try:
        command = [compiler, *FLAGS, "-o", partial, str(source), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise NativeBuildError(f"{compiler} failed on {source.name}: {done.stderr[-500:]}")
        # Another process may have been first; both libraries are the same.
        os.replace(partial, library)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{compiler} took more than {COMPILE_TIMEOUT_S} s") from error
    finally:
        Path(partial).unlink(missing_ok=True)


@cache
def _version(compiler: str) -> bytes:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{compiler} does not run: {error}") from error
    return done.stdout


@cache
def _cpu_features() -> bytes:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    seen = {line for line in lines if line.startswith(wanted)}
    return "\n".join([platform.machine(), *sorted(seen)]).encode()
