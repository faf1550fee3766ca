"""LORAPLEX_* variables as they are, from the environment or from files of secrets.

No settings library is needed here: the doctor also runs where only an engine is installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

MIN_SECRET_CHARS: Final = 32
SECRETS_DIR: Final = "LORAPLEX_SECRETS_DIR"


def read_secret_files() -> dict[str, str]:
    """LORAPLEX_* variables that lie in LORAPLEX_SECRETS_DIR, one a file, but those that are set."""
    folder = os.environ.get(SECRETS_DIR)
    if not folder or not Path(folder).is_dir():
        return {}
    found = {}
    for path in sorted(Path(folder).glob("loraplex_*")):
        name = path.name.upper()
        if path.is_file() and name not in os.environ:
            found[name] = path.read_text().strip()
    return found


def read_variable(name: str) -> str | None:
    """One of them, from the environment or from its file; None: neither, or empty."""
    return os.environ.get(name) or read_secret_files().get(name) or None


def with_login(url: str, user: str, password: str | None = None) -> str:
    """The Postgres at `url`, reached as somebody else."""
    parts = urlsplit(url)
    # libpq also reads them from the query, where they win over those before the host.
    query = "&".join(
        pair
        for pair in parts.query.split("&")
        if unquote(pair.partition("=")[0]) not in ("user", "password")
    )
    login = quote(user, safe="") + ("" if password is None else ":" + quote(password, safe=""))
    netloc = f"{login}@{parts.netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, query=query))
