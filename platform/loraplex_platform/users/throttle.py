"""Login throttling: per address, and tighter per e-mail from one address.

Never per e-mail alone: anybody could then lock an admin out by failing in their name. An attempt is counted before the password is looked at, in a committed transaction of its own:
parallel guesses cannot slip past the count, and a refused one costs no hashing.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from loraplex_platform.errors import TooManyAttemptsError
from loraplex_platform.users import queries
from loraplex_platform.users.visitor import network_of

WINDOW = timedelta(minutes=15)
MAX_PER_EMAIL = 8  # from one address
MAX_PER_ADDRESS = 60


def _subjects(email: str, address: str) -> tuple[tuple[str, int], tuple[str, int]]:
    network = network_of(address)
    # An e-mail may be as long as the column: its digest is not.
    digest = hashlib.sha256(email.encode("utf-8", "surrogateescape")).hexdigest()
    return (f"email:{digest} {network}", MAX_PER_EMAIL), (f"address:{network}", MAX_PER_ADDRESS)


async def admit(sessions: async_sessionmaker[AsyncSession], email: str, address: str) -> None:
    """Count an attempt.

    Raises:
        TooManyAttemptsError: too many failures from this address, for this e-mail or in all.
    """
    async with sessions() as session:
        counts = [
            (await queries.count_attempt(session, subject, WINDOW), limit)
            for subject, limit in _subjects(email, address)
        ]
        await session.commit()
    for (attempts, window_start), limit in counts:
        if attempts > limit:
            wait_s = (window_start + WINDOW - datetime.now(UTC)).total_seconds()
            raise TooManyAttemptsError(
                f"Too many failed logins; try again in {max(1, round(wait_s / 60))} minutes.",
                retry_after_s=max(1.0, wait_s),
            )


async def forgive(session: AsyncSession, email: str, address: str) -> None:
    """The login was right: the e-mail starts anew here, the address gets this attempt back."""
    (email_subject, _), (address_subject, _) = _subjects(email, address)
    await queries.clear_attempts(session, email_subject)
    await queries.uncount_attempt(session, address_subject)
