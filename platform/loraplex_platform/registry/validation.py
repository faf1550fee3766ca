"""Run `registry.validate` on an upload: a throw-away process with memory and time limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from loraplex_platform.errors import PlatformError
from loraplex_platform.local import exec_guard
from loraplex_platform.registry.errors import AdapterRejectedError

log = structlog.get_logger(__name__)

MAX_AT_ONCE = 2
_MAX_STDERR = 4000


class ValidationCrashedError(PlatformError):
    """The validator ended without a verdict for a reason that is not the adapter's size."""

    code = "validation_failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Facts about an adapter that passed."""

    digest: str
    size_bytes: int
    rank: int
    target_modules: list[str]
    parameters: int
    max_norm: float
    matched_modules: int
    total_modules: int
    checks: list[dict[str, Any]]
    memory: dict[str, Any]  # as `artifact.AdapterMemory`
    overhead: dict[str, Any]  # as `artifact.AdapterOverhead`


class Validator:
    """Checks folders against one base model.

    Args:
        base_config: the base model's config.json.
        max_rank: largest rank of any module.
        max_bytes: largest tensor file.
        memory_bytes: address space of the process.
        timeout_s: wall time of the process.
    """

    def __init__(
        self,
        base_config: Path,
        *,
        max_rank: int,
        max_bytes: int,
        memory_bytes: int,
        timeout_s: float,
    ) -> None:
        self._arguments = (
            f"--base-config={base_config}",
            f"--max-rank={max_rank}",
            f"--max-bytes={max_bytes}",
            f"--memory-bytes={memory_bytes}",
            f"--cpu-s={max(1, round(timeout_s))}",
        )
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def check(self, folder: Path) -> Verdict:
        """The facts of a sound adapter.

        Raises:
            AdapterRejectedError: it is not sound, or too large to check within the limits.
            ValidationCrashedError: our fault.
        """
        async with self._slots:
            process = await asyncio.create_subprocess_exec(
                # Nobody waits for its verdict once we are killed.
                *(sys.executable, "-I", "-S", exec_guard.__file__),
                *(str(os.getpid()), str(int(signal.SIGKILL)), "--"),
                *(sys.executable, "-I", "-m", "loraplex_platform.registry.validate"),
                f"--folder={folder}",
                *self._arguments,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                env=_bare_environment(),
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(self._timeout_s):
                    stdout, stderr = await process.communicate()
            except TimeoutError:
                raise self._too_slow() from None
            finally:
                await _end(process)
        return self._read(process.returncode, stdout, stderr)

    def _read(self, status: int | None, stdout: bytes, stderr: bytes) -> Verdict:
        if status in (-signal.SIGXCPU, -signal.SIGKILL):
            raise self._too_slow()
        if status != 0:
            log.error("validation_crashed", status=status, stderr=stderr[-_MAX_STDERR:].decode())
            if status is not None and status < 0:
                raise AdapterRejectedError(
                    "adapter_model",
                    f"the check of it was ended by signal {-status}.",
                    "Save the adapter again with safetensors; if it fails again, tell the operator.",
                )
            raise ValidationCrashedError("The adapter could not be checked; see the server's log.")
        verdict = json.loads(stdout)
        if not verdict.pop("ok"):
            raise AdapterRejectedError(verdict["field"], verdict["message"], verdict["remedy"])
        return Verdict(**verdict)

    def _too_slow(self) -> AdapterRejectedError:
        return AdapterRejectedError(
            "adapter_model",
            f"checking it took more than the {self._timeout_s:g} s allowed.",
            "Use a smaller rank or fewer target modules, or ask the operator to raise "
            "LORAPLEX_VALIDATION_TIMEOUT_S.",
        )


def _bare_environment() -> dict[str, str]:
    """No secrets, and one thread: a thread pool's stacks would eat the address space."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
