"""Tells all gateways, by way of Redis, that what they remember of a key, a tenant or limits is old.

The database leaves a message for each such change (migrations 0006 and 0011). The control API delivers it right
after its commit, the worker whatever is left over. A version is kept for longer than any gateway
remembers anything, so losing it costs at most those few seconds.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import structlog

from loraplex_platform.db.deadline import within
from loraplex_platform.errors import UnavailableError
from loraplex_platform.outbox.queries import Message
from loraplex_platform.outbox.relay import Relay, Topic
from loraplex_platform.rates import keys, scripts
from loraplex_platform.rates.redis_client import DeadlineRedis, RedisAwayError
from loraplex_platform.rates.redis_pipe import Argument

log = structlog.get_logger(__name__)

TOPIC = "version"
KEPT_S = 3600.0
TELL_DEADLINE_S = 2.0


def version_topic(redis: DeadlineRedis | None) -> Topic:
    """For the relay. Redis None: there is nobody to tell, gateways read again every few seconds.

    A Redis that is away is tried for a quarter of an hour: nobody needs the version after that.
    """

    async def publish(message: Message) -> None:
        payload = message.payload
        # Without a tenant: of the limits that tenants share.
        tenant_id = UUID(payload["tenant_id"]) if "tenant_id" in payload else None
        fields: list[Argument] = []
        if "key_id" in payload:
            fields += (UUID(payload["key_id"]).hex, int(payload["version"]))
        elif tenant_id is not None:
            fields += ("t", int(payload["version"]))
        if "limits_version" in payload:
            fields += ("l", int(payload["limits_version"]))
        if redis is None:
            return
        names = [keys.versions(keys.tag_of(tenant_id))]
        try:
            await redis.run(scripts.NEWEST, names, [round(KEPT_S * 1000), *fields])
        except RedisAwayError as error:
            raise UnavailableError(str(error)) from error

    return Topic(
        name=TOPIC, handle=publish, interval_s=0.5, claim_s=10.0, max_tries=20, max_wait_s=60.0
    )


async def tell_gateways(relay: Relay, left_at: datetime) -> None:
    """Deliver the versions that a transaction has just left, as far as that takes no longer than 2 s.

    Never raises: the worker does what is left.

    Args:
        left_at: the transaction's `now()`. Whoever changes something waits for nobody else's backlog.
    """
    try:
        await within(TELL_DEADLINE_S, relay.relay_once(left_at))
    except UnavailableError as error:
        log.warning("versions_left_to_worker", reason=error.message)
