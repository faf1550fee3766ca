"""CURVE keys for engines on TCP: key files, and the allow-list of gateways.

Key files are ZeroMQ's own certificate format; `python -m loraplex_engine.curve FOLDER NAME` makes a
pair, `NAME.key` (public, to hand out) and `NAME.key_secret` (0600). The allow-list is a text file
with one Z85 public key a line, `#` comments; it is read again when it changes, so taking a line out
shuts that gateway out at its next connection.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth

from loraplex_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 encoded."""

    public_key: bytes
    secret_key: bytes = field(repr=False)


def load_key_pair(path: Path) -> KeyPair:
    """Read a secret key file. Raises `ConfigError` when it is not one, or others can read it."""
    try:
        mode = path.stat().st_mode
        public_key, secret_key = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a CURVE key file ({error})") from error
    if secret_key is None:
        raise ConfigError(f"{path}: holds no secret key; give the .key_secret file")
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read this secret; run chmod 600 on it")
    return KeyPair(public_key, secret_key)


def make_key_pair(folder: Path, name: str) -> Path:
    """Write `NAME.key` and `NAME.key_secret`; returns the secret's path."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _public, secret = zmq.auth.create_certificates(folder, name)
    path = Path(secret)
    path.chmod(0o600)
    return path


class AllowList:
    """Client keys that may connect; pyzmq's authenticator calls `callback` for each handshake."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: frozenset[bytes] = frozenset()
        self.reload()

    def reload(self) -> None:
        """Read the file if it changed. Raises `ConfigError` when it cannot be read or is wrong."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            lines = self._path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read the allow-list: {error}") from error
        keys = [line.split("#")[0].strip().encode() for line in lines]
        bad = [key for key in keys if key and len(key) != 40]
        if bad:
            raise ConfigError(f"{self._path}: a line is not a Z85 public key of 40 characters")
        self._keys = frozenset(key for key in keys if key)
        self._stamp = stamp

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client that proved to hold `key` may connect; an unreadable list admits none."""
        try:
            self.reload()
        except ConfigError:
            return False
        return key in self._keys


def main() -> None:
    """The command line of the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_engine.curve",
        description="Make a CURVE key pair for an engine or a gateway.",
    )
    parser.add_argument("folder", type=Path, help="where the two files go")
    parser.add_argument("name", help="NAME.key is public, NAME.key_secret stays secret")
    arguments = parser.parse_args()
    secret = make_key_pair(arguments.folder, arguments.name)
    public_key = load_key_pair(secret).public_key.decode()
    sys.stdout.write(f"{secret}\npublic key, for the other side's list: {public_key}\n")


if __name__ == "__main__":
    main()
