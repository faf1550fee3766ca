"""What lies in a backup, and its checksums.

    manifest.json     what it is a backup of, and what it needs besides; written last but one
    database.dump     pg_dump's custom format
    adapters/         <2 hex>/<64 hex>/{adapter_config.json, adapter_model.safetensors}
    secrets.json      only if that was asked for; 0600
    SHA256SUMS        of all of them; `sha256sum -c SHA256SUMS` checks it anywhere. Written last:
                      a folder without it is no backup

A backup without secrets names those that it needs by fingerprints, so that a restore can tell whether it
has the right ones. They are long random strings: a fingerprint gives nothing away.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from loraplex_platform.backup.errors import BackupError

MANIFEST: Final = "manifest.json"
DUMP: Final = "database.dump"
ADAPTERS: Final = "adapters"
SECRETS: Final = "secrets.json"
SUMS: Final = "SHA256SUMS"
FORMAT: Final = 1
_CHUNK_BYTES = 1 << 20

# Which of the platform's secrets the data in a backup cannot be used without, and why.
NEEDED_SECRETS: Final = {
    "key_pepper": "API keys are known by their MAC under it: without it no key works",
    "salt_key": "prefix caches are salted with it: without it they start cold",
    "session_key": "logins are known by their MAC under it: without it everybody logs in again",
    "webhook_key": "webhook secrets are encrypted under it",
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """See the module's header.

    Attributes:
        made_at: ISO 8601.
        counts: rows of the tables that matter most, in the snapshot of the dump.
        ledger_pico: the sum of the ledger, as text.
        audit_heads: per chain the newest row's place and hash, as text.
        adapters: digests of the adapter versions in it.
        missing_adapters: digests that the database names and the store did not have.
        secrets: fingerprints of the secrets that it needs, as far as they were known.
    """

    made_at: str
    release: str
    schema_revision: str
    server_major: int
    counts: dict[str, int]
    ledger_pico: str
    audit_heads: dict[str, str]
    adapters: list[str]
    missing_adapters: list[str]
    secrets: dict[str, str]
    has_secrets: bool
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """As manifest.json."""
        write_durably(
            folder / MANIFEST, json.dumps(asdict(self), indent=2, sort_keys=True).encode() + b"\n"
        )


def read(folder: Path) -> Manifest:
    """The manifest of a backup.

    Raises:
        BackupError: this is no backup, or one of a newer release.
    """
    if not (folder / SUMS).is_file():
        raise BackupError(
            f"{folder} is no finished backup: it has no {SUMS}. Name the folder that `loraplex backup --to` "
            "was given."
        )
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if content["format"] > FORMAT:
            raise BackupError(
                f"{folder} was made by a newer release ({content['release']}): restore it with that one"
            )
        return Manifest(**content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackupError(f"{folder / MANIFEST} cannot be read: {error}") from error


def write_sums(folder: Path) -> None:
    """SHA256SUMS of every file there."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in _files(folder)]
    write_durably(folder / SUMS, "".join(lines).encode())


def check_sums(folder: Path) -> int:
    """Compare every file with SHA256SUMS; how many there are.

    Raises:
        BackupError: one is missing, changed, or not listed.
    """
    listed: dict[str, str] = {}
    try:
        for line in (folder / SUMS).read_text().splitlines():
            digest, name = line.split("  ", 1)
            listed[name] = digest
    except (OSError, ValueError) as error:
        raise BackupError(f"{folder / SUMS} cannot be read: {error}") from error
    found = set(_files(folder))
    if found != listed.keys():
        names = ", ".join(sorted(found ^ listed.keys())[:5])
        raise BackupError(f"{folder} has files too many or too few: {names}")
    for name, digest in listed.items():
        if sha256_of(folder / name) != digest:
            raise BackupError(f"{folder / name} is damaged: its checksum is another one")
    return len(listed)


def fingerprint(secret: str) -> str:
    """Enough of a hash to tell two secrets apart."""
    return hashlib.sha256(b"loraplex secret " + secret.encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """In hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """A file of its owner's only, on disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Have what was written there on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path != folder / SUMS
    )
