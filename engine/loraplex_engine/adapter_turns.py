"""Which adapters a step may lease anew, so that one that is not there is asked for once, and none starves.

Owns what a step has found out about adapters, and which one is to give its slot up; slots and leases are
the pool's (`step.AdapterPool`). Pure Python, no torch.

Where every slot is leased and somebody wants another adapter, one adapter *drains*: nobody may lease it
anew, or its slot would never be free while requests for it keep coming. It stays the same until its slot
is free; that of least work left is chosen. So does one of a tenant's own where it holds as many as it may
(`max_adapters`) and asks for another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loraplex_engine.request import BlockReason, Request
from loraplex_engine.step import AdapterPool


class AdapterTurns:
    """All calls come from the step thread."""

    def __init__(self, pool: AdapterPool) -> None:
        self._pool = pool
        self._drained: str | None = None  # the adapter that drains, over steps
        # Of this step: adapters that a tenant asked for in vain, and whether one drains.
        self._refused: dict[tuple[str, str], BlockReason] = {}
        self._draining: str | None = None

    def begin_step(self) -> None:
        """A step is being decided: ask anew."""
        self._refused.clear()
        self._draining = None

    def block_reason(self, request: Request) -> BlockReason | None:
        """What this step has found out so far about a waiting request's adapter."""
        if request.adapter_digest is None:
            return None
        if request.adapter_digest == self._draining:
            return BlockReason.ADAPTER_SLOT
        return self._refused.get((request.adapter_digest, request.generate.tenant_id))

    def lease(self, request: Request, running: Sequence[Request]) -> int | None:
        """The slot of a waiting request's adapter, leased; None: not now, and `block_reason` says why.

        Raises:
            AdapterUnavailableError, AdapterInvalidError: not ever.
        """
        digest, tenant_id = request.adapter_digest, request.generate.tenant_id
        assert digest is not None
        if self._has_its_most(request, running):
            return None
        slot = self._pool.lease(digest, tenant_id)
        if slot is None:
            reason = self._pool.why_refused(digest, tenant_id)
            self._refused[digest, tenant_id] = reason
            if reason is BlockReason.ADAPTER_SLOT and self._draining is None:
                self._draining = self._choose(running)
        return slot

    def _has_its_most(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether one adapter more in the slots would be more than the request's tenant may have there.

        Slots that it shares with other tenants count as its own, or what it may run would depend on them.
        Then one of its own drains, for its own requests alone: the nearest to its end, which it stays.
        """
        digest, tenant_id = request.adapter_digest, request.generate.tenant_id
        most = request.generate.max_adapters
        if digest is None or most is None:
            return False
        held = _work_left(one for one in running if one.generate.tenant_id == tenant_id)
        if digest in held or len(held) < most:
            return False
        for waits in (digest, min(held, key=held.__getitem__)):
            self._refused[waits, tenant_id] = BlockReason.ADAPTER_SHARE
        return True

    def _choose(self, running: Sequence[Request]) -> str:
        """The adapter whose slot goes to the first request that lacks one."""
        work_left = _work_left(running)
        assert work_left, "every slot is leased, but nobody runs with an adapter"
        if self._drained not in work_left:
            self._drained = min(work_left, key=work_left.__getitem__)
        assert self._drained is not None
        return self._drained


def _work_left(running: Iterable[Request]) -> dict[str, int]:
    """By adapter: the tokens until the last of its requests has ended, at most."""
    work_left: dict[str, int] = {}
    for request in running:
        if request.adapter_digest is not None:
            left = request.num_prompt_tokens + request.sampling.max_tokens - request.num_tokens
            work_left[request.adapter_digest] = max(work_left.get(request.adapter_digest, 0), left)
    return work_left
