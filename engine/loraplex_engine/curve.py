"""CURVE keys for engines on TCP: key files, and the allow-list of gateways.

A secret key file holds one line, the Z85 secret key, and is closed to others (0600); the public key
follows from it. `python -m loraplex_engine.curve FILE` makes one and prints the public key. The
allow-list is a text file with one Z85 public key a line, then a space and whatever helps to know whose
it is; lines starting with "# " are comments. It is read again when it changes, so taking a line out shuts that gateway out at its next connection.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import zmq

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
        secret_key = path.read_text(encoding="ascii").strip().encode()
        public_key = zmq.curve_public(secret_key)
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{path}: not a file with one Z85 secret key ({error})") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read this secret; run chmod 600 on it")
    return KeyPair(public_key, secret_key)


def make_key_pair(path: Path) -> KeyPair:
    """Write a new secret key to `path`, which must not exist. Raises `OSError`."""
    public_key, secret_key = zmq.curve_keypair()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secret_key + b"\n")
    return KeyPair(public_key, secret_key)


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
        # A key may itself hold, or begin with, "#": what ends it is a space.
        words = [line.split(maxsplit=1)[0] for line in lines if line.strip()]
        keys = [word.encode() for word in words if word != "#"]
        if any(len(key) != 40 for key in keys):
            raise ConfigError(
                f"{self._path}: a line does not start with a Z85 public key of 40 characters, nor"
                ' with "# "'
            )
        self._keys = frozenset(keys)
        self._stamp = stamp

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client that proved to hold `key` may connect; an unreadable list admits none."""
        try:
            self.reload()
        except ConfigError:
            return False
        return key in self._keys


def main() -> int:
    """The command line of the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex_engine.curve",
        description="Make a CURVE key for an engine or a gateway; prints the public key.",
    )
    parser.add_argument("file", type=Path, help="where the secret key goes; must not exist")
    arguments = parser.parse_args()
    try:
        keys = make_key_pair(arguments.file)
    except OSError as error:
        sys.stderr.write(f"curve: {error}\n")
        return 1
    sys.stdout.write(keys.public_key.decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
