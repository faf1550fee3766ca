"""Block tables: which blocks hold each sequence's keys and values, in order; and what they share.

Owns the tables; block numbers belong to `BlockPool`, names to `PrefixCache`. A table only grows, until it
is freed whole, last block first, so that the start of a sequence is evicted last.

A request finds what it need not compute (`lookup`), takes its blocks (`admit`), and says what has been
written and is sound (`commit`): only then can others find a block. What it finds is
* the longest run of its full blocks that the prefix cache knows, or
* another choice of the same request that has computed their prompt: its full blocks are shared, and the
  one that is partly filled is copied, since each choice goes on writing in it. A choice that ends before
  others could begin leaves them its prompt's blocks, until the last of them has begun or somebody needs
  the room (`leave`).
The last known token is always computed, because its logits are what the next one is drawn from.

What comes next may be what another request is computing. Who waits for that remembers what it waits for
(`Request.awaited`), so that each step asks for it in constant time (`leaders`), however many wait.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loraplex_engine.kv.block_pool import BlockPool
from loraplex_engine.kv.hashing import BlockChain, BlockName
from loraplex_engine.kv.left_prompts import choose_to_drop
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.request import Request, RequestStatus

MAX_CHAINS_KEPT = 32  # of the prompts looked up last, whose names equal prompts take over
SCANS_PER_HASH = 16  # looking a block's name up costs so much less than making it


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request that is to be admitted finds. Good until the next call that changes a table."""

    num_tokens: int = 0  # need not be computed
    blocks: tuple[int, ...] = ()  # to be shared
    copy_from: int | None = None  # the block that follows, to be copied
    num_idle: int = 0  # of the shared blocks: free so far
    # Somebody is computing what comes next, and may be waited for: that is cheaper than to compute it as
    # well. Whoever it is runs, and loses the promise with its blocks, so nobody waits for what never comes.
    is_coming: bool = False


NO_HIT = Hit()


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    request: Request | None = None  # whose it is, if it was made by `admit`
    chain: BlockChain | None = None
    num_written: int = 0  # tokens whose keys and values are in the blocks, and sound
    num_unnamed: int = 0  # of the blocks it took itself: without a name, on its owner's account
    num_settled: int = 0  # leading blocks that can be found, or need not
    num_expected: int = 0  # blocks up to here, from the settled ones on, are promised to others


class _ChainKey(NamedTuple):
    """What makes the names of two prompts' blocks equal."""

    tenant_id: str
    salt: bytes
    adapter_digest: str | None
    prompt: bytes  # SHA-256


class KvManager:
    """Tables by an integer key: the request's `seq`.

    Args:
        cache: None: nothing is found but what choices of one request share.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, cache: PrefixCache | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least one token")
        if cache is not None and cache.hasher.block_size != block_size:
            raise ValueError(f"the cache names blocks of {cache.hasher.block_size} tokens")
        self._pool = pool
        self._cache = cache
        self._tables: dict[int, _Table] = {}
        # Of choices that have ended, the prompts' tables, by the first choice's key; oldest first.
        self._left: dict[int, _Table] = {}
        # Least recently used first.
        self._chains: OrderedDict[_ChainKey, BlockChain] = OrderedDict()
        self.block_size = block_size
        self.lookup_work = 0  # what all look-ups have cost, in names made

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks in nobody's table, those with cached contents included."""
        return self._pool.num_free

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    @property
    def num_left(self) -> int:
        """Tables that ended choices have left to those of their request that wait."""
        return len(self._left)

    @property
    def num_query_tokens(self) -> int:
        """Prompt tokens looked up in the prefix cache, once per request."""
        return 0 if self._cache is None else self._cache.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Those of them that were found."""
        return 0 if self._cache is None else self._cache.num_hit_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, key: int) -> int:
        """The length of `key`'s table; 0 when it has none."""
        table = self._tables.get(key)
        return 0 if table is None else len(table.blocks)

    def grow(self, key: int, num_tokens: int) -> list[int] | None:
        """Make `key`'s table hold `num_tokens` tokens in all.

        Returns:
            The blocks appended, possibly none; None when too few are free (nothing has changed).
        """
        table = self._tables.get(key)
        missing = self.blocks_for(num_tokens) - (len(table.blocks) if table is not None else 0)
        if missing <= 0:
            return []
        num_lacking = missing - self._pool.num_free
        if num_lacking > 0:
            owner = None if table is None else table.request
            keys = self.left_to_drop(owner, num_lacking, with_own=True)
            if not keys:
                return None
            self.drop_left(keys)
        if table is None:
            table = self._tables[key] = _Table([])
        blocks = self._take(missing, table)
        table.blocks.extend(blocks)
        return blocks

    def free(self, key: int) -> None:
        """Give up `key`'s table, last block first, so that the start of a sequence is reused last.

        Raises:
            KeyError: there is no such table.
        """
        table = self._tables.pop(key)
        self._stop_expecting(table, key)
        self._release(table, 0)

    def leave(self, request: Request) -> None:
        """As `free`, of a choice that has ended; but the blocks of a prompt that it has computed stay for
        choices of the request that wait, if no other one could give it to them.
        """
        table = self._tables[request.seq]
        num_blocks = self.blocks_for(
            request.num_prompt_tokens - 1
        )  # the last token is computed anew
        if (
            not num_blocks
            or table.num_written < request.num_prompt_tokens
            or not _is_waited_for(request)
            or self._source_for(request) is not None
        ):
            self.free(request.seq)
            return
        del self._tables[request.seq]
        self._stop_expecting(table, request.seq)
        self._release(table, num_blocks)
        table.num_written = request.num_prompt_tokens - 1
        self._left[request.siblings[0].seq] = table

    def note_choice(self, request: Request) -> None:
        """A choice has begun or ended: what was left goes once nobody waits for it."""
        if request.siblings and not _is_waited_for(request):
            table = self._left.pop(request.siblings[0].seq, None)
            if table is not None:
                self._release(table, 0)

    def left_to_drop(
        self,
        request: Request | None,
        num_blocks: int,
        *,
        hit: Hit = NO_HIT,
        with_own: bool = False,
    ) -> list[int]:
        """What was left that is to go so that a request has `num_blocks` more blocks: its own tenant's
        before others', then the oldest first, and none in vain.

        Args:
            hit: what it would share; a block of it that only becomes idle is no gain.
            with_own: also what choices of the same request have left. To one that waits this is of little
                use, as it then needs nearly as many blocks itself, and computes the prompt anew.

        Returns:
            For `drop_left`; empty if all of it would not do.
        """
        own = request.siblings[0].seq if request is not None and request.siblings else None
        tenant_id = None if request is None else request.generate.tenant_id

        def is_others(key: int) -> bool:
            owner = self._left[key].request
            return owner is None or owner.generate.tenant_id != tenant_id

        keys = [key for key in self._left if with_own or key != own]
        left = {key: self._left[key].blocks for key in sorted(keys, key=is_others)}
        return choose_to_drop(left, num_blocks, self._pool.num_holders, hit.blocks)

    def drop_left(self, keys: list[int]) -> None:
        """Give up what was left: it would be computed anew. A `Hit` from before may be void."""
        for key in keys:
            self._release(self._left.pop(key), 0)

    def _stop_expecting(self, table: _Table, key: int) -> None:
        if self._cache is not None and table.chain is not None:
            for name in table.chain.names[table.num_settled : table.num_expected]:
                self._cache.stop_expecting(name, key)
            table.num_expected = table.num_settled

    def _release(self, table: _Table, num_kept: int) -> None:
        """Give up all but the first blocks of a table in which nobody writes any more, last block first."""
        blocks = table.blocks[num_kept:]
        del table.blocks[num_kept:]
        table.num_settled = table.num_expected = min(table.num_settled, num_kept)
        cache = self._cache
        if cache is None or table.chain is None:
            self._pool.release(reversed(blocks))
            return
        num_unnamed = table.num_unnamed
        if num_kept:
            # After the cache was emptied these may be more than are on the account.
            num_unnamed = min(num_unnamed, sum(not cache.is_named(block) for block in blocks))
        cache.note_unnamed(table.chain.owner, -num_unnamed)
        table.num_unnamed -= num_unnamed
        for block in reversed(blocks):
            self._pool.release((block,))
            if cache.is_named(block) and self._pool.num_holders(block) == 0:
                cache.note_idle(block)

    # ------------------------------------------------------------------ sharing

    def leaders(self, request: Request) -> list[Request]:
        """Who still computes what a waiting request was told to be coming when it was last looked up.

        Nobody: look it up anew. Constant time; what was found meanwhile of the way there is left aside.
        """
        awaited = request.awaited
        if awaited is None:
            return []
        if isinstance(awaited, Request):
            table = self._tables.get(awaited.seq)
            has_it = table is None or table.num_written >= request.num_prompt_tokens
            return [] if has_it else [awaited]
        cache = self._cache
        assert cache is not None
        return [] if cache.is_known(awaited) else self._promised_by(awaited, cache)

    def lookup(
        self, request: Request, may_wait_for: Callable[[Request], bool] = lambda leader: True
    ) -> Hit:
        """What a request without a table would find now.

        Args:
            may_wait_for: whether it may wait for a request that is computing what comes next.
        """
        request.awaited = None
        hit = self._find_cached(request, may_wait_for)
        # Choices of one request: once a neighbour has the whole prompt, only its last token is left.
        if len(request.siblings) > 1 and hit.num_tokens < request.num_prompt_tokens - 1:
            source = self._source_for(request)
            if source is not None:
                request.awaited = None
                return self._fork_from(source, request.num_prompt_tokens - 1)
            for sibling in request.siblings:
                if sibling is request or sibling.status is not RequestStatus.RUNNING:
                    continue
                request.awaited = sibling
                hit = Hit(is_coming=True)
        return hit

    def num_missing(self, hit: Hit, num_tokens: int) -> int:
        """Blocks that fewer are free once a request with this hit has room for `num_tokens`."""
        return self.blocks_for(num_tokens) - len(hit.blocks) + hit.num_idle

    def admit(
        self, request: Request, hit: Hit, num_tokens: int
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Make the table of a request that is to run: what it found, and new blocks up to `num_tokens`.

        There must be room (`num_missing`). Counts the look-up, for the first time that the request (or
        another choice of it) is admitted.

        Returns:
            All its blocks; and which block is to be copied into which before anything is computed.
        """
        assert request.seq not in self._tables, f"{request.identity} has a table"
        for block in hit.blocks:
            if self._cache is not None and self._cache.is_idle(block):
                self._cache.note_held(block)
        self._pool.share(hit.blocks)
        table = _Table(
            [*hit.blocks],
            request,
            request.chain,
            num_written=hit.num_tokens,
            num_settled=len(hit.blocks),
            num_expected=len(hit.blocks),
        )
        table.blocks += self._take(self.blocks_for(num_tokens) - len(hit.blocks), table)
        copy = None if hit.copy_from is None else (hit.copy_from, table.blocks[len(hit.blocks)])
        self._tables[request.seq] = table
        if self._cache is not None and request.chain is not None:
            table.num_expected = max(table.num_settled, request.num_tokens // self.block_size)
            request.chain.extend(request.token_ids, table.num_expected)
            for name in request.chain.names[table.num_settled : table.num_expected]:
                self._cache.expect(name, request.seq)
            if not request.has_begun:
                request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
                self._cache.num_query_tokens += request.num_prompt_tokens
                self._cache.num_hit_tokens += request.num_cached_tokens
        request.was_admitted = True
        self.note_choice(request)
        return table.blocks.copy(), copy

    def commit(self, request: Request, num_written: int) -> None:
        """The first `num_written` tokens of a running request are in its blocks and sound: those blocks
        that they fill can be found from here on.
        """
        table = self._tables[request.seq]
        assert num_written >= table.num_written, "what was written does not go away"
        assert num_written <= request.num_tokens, "only known tokens are written for good"
        table.num_written = num_written
        chain, cache = table.chain, self._cache
        if chain is None or cache is None:
            return
        num_full = num_written // self.block_size
        chain.extend(request.token_ids, num_full)
        for index in range(table.num_settled, num_full):
            if cache.store(chain, index, table.blocks[index]):
                self._pool.keep(table.blocks[index])
                table.num_unnamed -= 1
            if index < table.num_expected:
                cache.stop_expecting(chain.names[index], request.seq)
            table.num_settled = index + 1
        table.num_expected = max(table.num_expected, table.num_settled)

    def forget_cached(self) -> None:
        """Empty the prefix cache; running requests keep their blocks."""
        if self._cache is not None:
            for block in self._cache.clear():
                self._pool.unkeep(block)

    def _find_cached(self, request: Request, may_wait_for: Callable[[Request], bool]) -> Hit:
        cache = self._cache
        if cache is None or not request.generate.tenant_salt:
            return NO_HIT  # without a salt there is no telling whose it is
        if request.chain is None:
            request.chain = self._chain_of(request, cache)
        limit = (request.num_tokens - 1) // self.block_size
        names = request.chain.names
        self.lookup_work += max(0, limit - len(names))
        request.chain.extend(request.token_ids, limit)
        blocks = cache.find(names, limit)
        until = len(blocks)  # where what is cached or is coming ends
        if until < limit:
            coming = self._promised_by(names[until], cache)
            keys = {leader.seq for leader in coming if may_wait_for(leader)}
            while until < limit and not keys.isdisjoint(cache.expected_by(names[until])):
                until += 1
        is_coming = until > len(blocks)
        if is_coming:
            request.awaited = names[until - 1]
        self.lookup_work += 1 + until // SCANS_PER_HASH
        return Hit(
            num_tokens=len(blocks) * self.block_size,
            blocks=tuple(blocks),
            num_idle=sum(self._pool.num_holders(block) == 0 for block in blocks),
            is_coming=is_coming,
        )

    def _promised_by(self, name: BlockName, cache: PrefixCache) -> list[Request]:
        requests = [self._tables[key].request for key in cache.expected_by(name)]
        return [request for request in requests if request is not None]

    def _chain_of(self, request: Request, cache: PrefixCache) -> BlockChain:
        for sibling in request.siblings:
            if sibling.chain is not None:
                return sibling.chain.fork(request.num_prompt_tokens // self.block_size)
        generate = request.generate
        prompt = generate.prompt_token_ids
        key = _ChainKey(
            generate.tenant_id,
            generate.tenant_salt,
            generate.adapter_digest,
            hashlib.sha256(array("I", prompt)).digest(),
        )
        self.lookup_work += len(prompt) // (self.block_size * SCANS_PER_HASH)
        equal = self._chains.pop(key, None)
        chain = (
            equal.fork(len(prompt) // self.block_size)
            if equal is not None
            else cache.hasher.chain(
                prompt,
                owner=generate.tenant_id,
                salt=generate.tenant_salt,
                adapter_digest=generate.adapter_digest,
            )
        )
        self._chains[key] = chain
        if len(self._chains) > MAX_CHAINS_KEPT:
            self._chains.popitem(last=False)
        return chain

    def _source_for(self, request: Request) -> _Table | None:
        """A table of another choice of the request that has their whole prompt."""
        for sibling in request.siblings:
            if sibling is not request and sibling.status is RequestStatus.RUNNING:
                table = self._tables[sibling.seq]
                if table.num_written >= request.num_prompt_tokens:
                    return table
        return self._left.get(request.siblings[0].seq) if request.siblings else None

    def _fork_from(self, table: _Table, num_tokens: int) -> Hit:
        num_full, rest = divmod(num_tokens, self.block_size)
        return Hit(
            num_tokens=num_tokens,
            blocks=tuple(table.blocks[:num_full]),
            copy_from=table.blocks[num_full] if rest else None,
        )

    def _take(self, count: int, table: _Table) -> list[int]:
        """`count` free blocks for a table; cached contents go only when no others are free."""
        if self._cache is not None:
            if table.chain is not None:
                table.num_unnamed += count
                request = table.request
                weight = None if request is None else _memory_weight(request)
                self._cache.note_unnamed(table.chain.owner, count, weight=weight)
            missing = count - self._pool.num_listed
            if missing > 0:
                for block in self._cache.evict(missing):
                    self._pool.unkeep(block)
        return self._pool.take(count)

    def check(self) -> None:
        """Assert the pool's and the cache's invariants, and that they and the tables agree."""
        pool, cache = self._pool, self._cache
        pool.check()
        tables = [*self._tables.values(), *self._left.values()]
        held = Counter(block for table in tables for block in table.blocks)
        for block in range(pool.num_blocks):
            holders = pool.num_holders(block)
            assert holders >= held[block], f"block {block}: {held[block]} tables, {holders} holders"
        if cache is None:
            return
        cache.check()
        unnamed = sum(table.num_unnamed for table in tables)
        assert unnamed == cache.num_unnamed, "a block is on nobody's account"
        promised = 0
        for block in range(pool.num_blocks):
            assert pool.is_kept(block) == cache.is_named(block), f"block {block}: named or kept"
            is_idle = cache.is_named(block) and pool.num_holders(block) == 0
            assert cache.is_idle(block) == is_idle, f"block {block}: idle or held"
        for table in tables:
            assert table.num_settled <= table.num_expected <= len(table.blocks)
            if table.chain is not None:
                promised += table.num_expected - table.num_settled
                assert table.num_settled >= table.num_written // self.block_size
                for index, block in enumerate(table.blocks):
                    name = cache.name_of(block)
                    assert name in (None, *table.chain.names[index : index + 1]), "a stale name"
        assert promised == cache.num_expected, "a promise outlived its request"


def _is_waited_for(request: Request) -> bool:
    """Whether other choices of a request wait to run."""
    return any(
        sibling is not request
        and sibling.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        for sibling in request.siblings
    )


def _memory_weight(request: Request) -> float:
    """Of the share of the cache that the request's tenant has beside others."""
    generate = request.generate
    return generate.weight if generate.memory_weight is None else generate.memory_weight
