"""Password hashing: argon2id, off the event loop, a bounded number at once (each takes 64 MiB)."""

from __future__ import annotations

import asyncio

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.profiles import RFC_9106_LOW_MEMORY

MAX_AT_ONCE = 2
MIN_PASSWORD_CHARS = 10
MAX_PASSWORD_CHARS = 256


class Passwords:
    """Hash and verify. `hasher` is replaced by a cheap one in tests."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher.from_parameters(RFC_9106_LOW_MEMORY)
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._decoy: str | None = None

    async def hash(self, password: str) -> str:
        """The encoded hash, with its parameters and salt."""
        async with self._slots:
            return await asyncio.to_thread(self._hasher.hash, password)

    async def verify(self, encoded: str | None, password: str) -> bool:
        """True if the password fits. None takes as long: no telling which e-mails exist."""
        if encoded is None:
            if self._decoy is None:
                self._decoy = await self.hash("no user has this hash")
            await self._verify(self._decoy, password)
            return False
        return await self._verify(encoded, password)

    def is_outdated(self, encoded: str) -> bool:
        """True if it was made with other parameters than today's."""
        return self._hasher.check_needs_rehash(encoded)

    async def _verify(self, encoded: str, password: str) -> bool:
        async with self._slots:
            try:
                return await asyncio.to_thread(self._hasher.verify, encoded, password)
            except (VerificationError, InvalidHashError):
                return False
