"""The secrets of a deployment as files, one each: what compose mounts, and LORAPLEX_SECRETS_DIR names.

Made once, never overwritten: losing the pepper makes every API key invalid. URLs that hold a password are secrets
too, so they are made here, from the passwords.

| file | who reads it |
|---|---|
| loraplex_postgres_password, loraplex_owner_database_url | Postgres, and `loraplex migrate` |
| loraplex_serve_password, loraplex_database_url | `loraplex migrate`, and whoever serves |
| loraplex_redis_password, loraplex_redis_url | Redis, and whoever counts or registers there |
| loraplex_key_pepper, loraplex_salt_key, loraplex_session_key, loraplex_webhook_key, loraplex_admin_key | see compose.yaml |
| loraplex_admin_password, loraplex_grafana_password | people |
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex_platform.tenancy.keys import mint

SERVE_ROLE: Final = "loraplex_serve"
_RANDOM: Final = (
    "loraplex_postgres_password",
    "loraplex_serve_password",
    "loraplex_redis_password",
    "loraplex_key_pepper",
    "loraplex_salt_key",
    "loraplex_session_key",
    "loraplex_webhook_key",
    "loraplex_admin_password",
    "loraplex_grafana_password",
)
_SECRET_BYTES: Final = 32


class SecretsFolderError(Exception):
    """The folder cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Made:
    """What `make_secret_files` did."""

    made: tuple[str, ...]
    kept: tuple[str, ...]


def make_secret_files(
    folder: Path,
    *,
    postgres: str = "postgres:5432",
    redis: str = "redis:6379",
    database: str = "loraplex",
    owner: str = "loraplex",
) -> Made:
    """Make what is missing in `folder`.

    The folder is closed to others (0700), and its files are readable within (0444): compose mounts each into
    containers whose users are not the owner.

    Raises:
        SecretsFolderError: it cannot be written, or a password and the URL that holds it do not match.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        values = {
            name: (folder / name).read_text().strip()
            for name in (*_RANDOM, "loraplex_admin_key")
            if (folder / name).exists()
        }
        made = []
        for name in _RANDOM:
            if name not in values:
                values[name] = secrets.token_urlsafe(_SECRET_BYTES)
                made.append(name)
        if "loraplex_admin_key" not in values:
            values["loraplex_admin_key"] = mint("ak").secret
            made.append("loraplex_admin_key")
        urls = {
            "loraplex_owner_database_url": f"postgresql://{owner}:{values['loraplex_postgres_password']}@{postgres}/{database}",
            "loraplex_database_url": f"postgresql://{SERVE_ROLE}:{values['loraplex_serve_password']}@{postgres}/{database}",
            "loraplex_redis_url": f"redis://:{values['loraplex_redis_password']}@{redis}/0",
        }
        passwords = {
            "loraplex_owner_database_url": "loraplex_postgres_password",
            "loraplex_database_url": "loraplex_serve_password",
            "loraplex_redis_url": "loraplex_redis_password",
        }
        for name, url in urls.items():
            path = folder / name
            if not path.exists():
                values[name] = url
                made.append(name)
            elif values[passwords[name]] not in path.read_text():
                raise SecretsFolderError(
                    f"{path} does not hold the password of {passwords[name]}: remove it, and it is made anew"
                )
        for name in made:
            _write(folder / name, values[name])
    except OSError as error:
        raise SecretsFolderError(
            f"{folder} cannot be used ({error.strerror}): give a folder that you own"
        ) from error
    everything = (*_RANDOM, "loraplex_admin_key", *urls)
    return Made(tuple(made), tuple(name for name in everything if name not in made))


def _write(path: Path, value: str) -> None:
    """Whole or not at all, and never over what is there."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(value + "\n")
        file.flush()
        os.fsync(fd)
        os.fchmod(fd, 0o444)
    new.replace(path)
