"""The secrets of a local fleet: made at the first start, kept in secrets.json, never printed.

Outside local mode the same secrets come from the environment and have no default.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from loraplex_platform.local.data_dir import read_json, write_private
from loraplex_platform.local.errors import SettingError

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the platform's processes must know and nobody else."""

    key_pepper: str = field(repr=False)
    salt_key: str = field(repr=False)
    session_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    # Whom the serving processes log in to Postgres as. `loraplex migrate` brings the role in line at
    # every start, so these two are made anew where they are missing.
    serve_role: str
    serve_password: str = field(repr=False)
    # Webhook secrets are encrypted under it; of data directories from before it, made anew too.
    webhook_key: str = field(repr=False)


def load_or_make(path: Path) -> Credentials:
    """The secrets in `path`; new ones on first use.

    Losing the pepper makes every issued key invalid, so a damaged file is an error, not a fresh start.

    Raises:
        SettingError: the file is damaged, or others may read it.
    """
    content = read_json(path)
    renewed = {
        # One server may hold the databases of several data directories: each has a login of its own.
        "serve_role": f"loraplex_serve_{secrets.token_hex(4)}",
        "serve_password": secrets.token_urlsafe(SECRET_BYTES),
        "webhook_key": secrets.token_urlsafe(SECRET_BYTES),
    }
    if content is None:
        made = Credentials(
            key_pepper=secrets.token_urlsafe(SECRET_BYTES),
            salt_key=secrets.token_urlsafe(SECRET_BYTES),
            session_key=secrets.token_urlsafe(SECRET_BYTES),
            admin_key=_mint_admin_key(),
            **renewed,
        )
        write_private(path, asdict(made))
        return made
    if path.stat().st_mode & 0o077:
        raise SettingError(f"{path} may be read by others: chmod 600 {path}")
    is_renewed = not renewed.keys() <= content.keys()
    if is_renewed:
        # What is there stays: a lost webhook key would cost every webhook its secret.
        content = {**renewed, **content}
    names = [item.name for item in fields(Credentials)]
    missing = [name for name in names if not isinstance(content.get(name), str)]
    if missing:
        raise SettingError(f"{path} lacks {', '.join(missing)}: restore it from a backup")
    found = Credentials(**{name: content[name] for name in names})
    if is_renewed:
        write_private(path, asdict(found))
    return found


def _mint_admin_key() -> str:
    from loraplex_platform.tenancy.keys import mint

    return mint("ak").secret
