"""What can stop `loraplex up`: each error says what happened and what to do about it."""

from __future__ import annotations

from pathlib import Path


class LocalModeError(Exception):
    """Base: the message is shown to the person at the terminal as it is."""


class DataDirInUseError(LocalModeError):
    """Another `loraplex up` holds the data directory."""

    def __init__(self, data_dir: Path, pid: int | None) -> None:
        holder = "another process" if pid is None else f"`loraplex up` with pid {pid}"
        remedy = "stop that one first" if pid is None else f"stop that one first (kill {pid})"
        super().__init__(
            f"{data_dir} is in use by {holder}: {remedy}, or give this one a --data-dir of its own"
        )
        self.pid = pid


class PortTakenError(LocalModeError):
    """A port that was asked for is not free."""


class SettingError(LocalModeError):
    """A flag or a file in the data directory cannot be used."""


class ServiceFailedError(LocalModeError):
    """A service ended, or did not become ready in time, before it was ever ready."""

    def __init__(self, name: str, reason: str, log_file: Path, last_lines: list[str]) -> None:
        super().__init__(f"{name} {reason}; its log is {log_file}")
        self.name = name
        self.log_file = log_file
        self.last_lines = last_lines


class StillRunningError(LocalModeError):
    """A process could not be ended."""

    def __init__(self, name: str, pid: int) -> None:
        super().__init__(
            f"{name} (pid {pid}) still runs, although it was killed: look at it with `ps -fp {pid}`"
        )
