"""PrefixCache with BlockPool and KvManager: what is found, what goes first, and a naive model of it all."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loraplex_engine.block_events import BlockEvent
from loraplex_engine.kv.block_pool import BlockPool, OutOfBlocksError
from loraplex_engine.kv.hashing import BlockHasher
from loraplex_engine.kv.manager import KvManager
from loraplex_engine.kv.prefix_cache import PrefixCache
from loraplex_engine.request import Request, RequestStatus

from tests.support.engine_fakes import make_request

SIZE = 2  # tokens per block


@dataclass
class Stand:
    """A manager with a cache, and requests that run on it."""

    kv: KvManager
    cache: PrefixCache
    pool: BlockPool
    next_seq: int = 0
    running: list[Request] = field(default_factory=list)

    def request(self, prompt: list[int], tenant: str = "t", adapter: str | None = None) -> Request:
        generate = make_request(f"r{self.next_seq}", prompt, tenant=tenant, adapter=adapter)
        self.next_seq += 1
        return Request(seq=self.next_seq, generate=generate, stop_ids=frozenset())

    def admit(self, request: Request) -> int:
        """Run it; how many tokens it found."""
        hit = self.kv.lookup(request)
        self.kv.admit(request, hit, request.num_tokens)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return hit.num_tokens

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        request.status = RequestStatus.FINISHED
        self.kv.free(request.seq)

    def serve(
        self,
        prompt: list[int],
        tenant: str = "t",
        adapter: str | None = None,
        *,
        weight: float = 1.0,
    ) -> int:
        """Compute a prompt and be done; how many of its tokens were found."""
        request = self.request(prompt, tenant, adapter)
        request.generate = msgspec.structs.replace(request.generate, weight=weight)
        found = self.admit(request)
        self.kv.commit(request, request.num_tokens)
        self.finish(request)
        self.kv.check()
        return found

    def found(self, prompt: list[int], tenant: str = "t") -> int:
        """How many tokens of a prompt would be found, without touching anything."""
        return self.kv.lookup(self.request(prompt, tenant)).num_tokens


def make_stand(num_blocks: int = 8, share: float | None = None) -> Stand:
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(model_fingerprint="m", kv_format="f", block_size=SIZE)
    cache = PrefixCache(hasher, num_blocks, tenant_share=share)
    return Stand(KvManager(pool, SIZE, cache=cache), cache, pool)


# ------------------------------------------------------------------ what is found


def test_what_was_computed_is_found_but_for_the_last_token() -> None:
    stand = make_stand()

    assert stand.serve([1, 2, 3, 4, 5]) == 0
    assert stand.serve([1, 2, 3, 4, 5]) == 4
    # Six tokens fill three blocks, but the logits of the last one are needed.
    assert stand.serve([1, 2, 3, 4, 5, 6]) == 4
    assert stand.serve([1, 2, 3, 4, 5, 6]) == 4
    assert stand.serve([1, 2, 3, 4, 5, 6, 7]) == 6
    assert stand.serve([1, 2, 9, 9, 9]) == 2


def test_only_what_was_committed_is_found() -> None:
    stand = make_stand()
    request = stand.request([1, 2, 3, 4, 5, 6])
    stand.admit(request)

    assert stand.found([1, 2, 3, 4, 5]) == 0
    stand.kv.commit(request, 3)
    assert stand.found([1, 2, 3, 4, 5]) == 2
    stand.kv.commit(request, 6)
    assert stand.found([1, 2, 3, 4, 5]) == 4
    stand.kv.check()


def test_the_run_ends_at_the_first_hole() -> None:
    """Fault 27: blocks behind one that was evicted are not counted as found."""
    stand = make_stand(num_blocks=4)
    stand.serve([1, 2, 3, 4, 5, 6, 7, 8])
    middle = stand.cache.find(_names(stand), 2)[1]
    stand.cache._forget(middle)
    stand.pool.unkeep(middle)

    assert stand.cache.num_named == 3
    assert stand.found([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 2


def _names(stand: Stand) -> list[bytes]:
    generate = make_request(prompt=[1, 2, 3, 4])
    chain = stand.cache.hasher.chain(
        generate.prompt_token_ids, owner="t", salt=generate.tenant_salt, adapter_digest=None
    )
    chain.extend(generate.prompt_token_ids, 2)
    return chain.names


def test_a_block_that_is_handed_out_again_has_no_name() -> None:
    """Fault 27: a stale hash on a reused block."""
    stand = make_stand(num_blocks=2)
    stand.serve([1, 2, 3, 4])
    stand.admit(stand.request([9, 9, 9]))

    assert stand.cache.num_named == 0
    assert stand.found([1, 2, 3]) == 0
    stand.kv.check()


def test_shared_blocks_are_held_by_all_and_free_after_the_last() -> None:
    stand = make_stand()
    stand.serve([1, 2, 3, 4, 5])
    first, second = stand.request([1, 2, 3, 4, 6]), stand.request([1, 2, 3, 4, 7])
    stand.admit(first)
    assert stand.kv.num_free == 5
    stand.admit(second)
    assert stand.kv.num_free == 4

    stand.finish(first)
    assert stand.kv.num_free == 5
    stand.kv.check()
    stand.finish(second)
    assert stand.kv.num_free == 8


def test_a_hit_survives_the_need_for_room_that_it_comes_with() -> None:
    """The blocks that a request found are not evicted to make room for the rest of it."""
    stand = make_stand(num_blocks=4)
    stand.serve([1, 2, 3, 4])
    stand.serve([5, 6, 7, 8])

    assert stand.serve([1, 2, 3, 4, 9, 9, 9]) == 4
    assert stand.found([5, 6, 7]) == 0


def test_no_room_is_refused_before_anything_is_evicted() -> None:
    stand = make_stand(num_blocks=2)
    stand.serve([1, 2, 3, 4])
    request = stand.request([1, 2, 5, 6, 7])

    hit = stand.kv.lookup(request)

    assert (hit.num_tokens, hit.num_idle) == (2, 1)
    assert stand.kv.num_missing(hit, 5) == 3
    assert stand.kv.grow(99, 5) is None
    assert stand.found([1, 2, 3]) == 2


def test_equal_blocks_computed_twice_are_kept_once() -> None:
    stand = make_stand()
    first, second = stand.request([1, 2, 3]), stand.request([1, 2, 4])
    stand.admit(first)
    stand.admit(second)
    stand.kv.commit(first, 3)
    stand.kv.commit(second, 3)
    stand.kv.check()

    assert stand.cache.num_named == 1
    stand.finish(first)
    stand.finish(second)
    assert stand.pool.num_listed == 7
    stand.kv.check()


def test_without_a_salt_nothing_is_kept_or_found() -> None:
    stand = make_stand()
    for _ in range(2):
        request = stand.request([1, 2, 3, 4, 5])
        request.generate = msgspec.structs.replace(request.generate, tenant_salt=b"")
        assert stand.admit(request) == 0
        stand.kv.commit(request, 5)
        stand.finish(request)

    assert stand.cache.num_named == 0


def test_clearing_leaves_running_requests_their_blocks() -> None:
    stand = make_stand()
    stand.serve([1, 2, 3, 4, 5])
    request = stand.request([1, 2, 3, 4, 5, 6])
    stand.admit(request)

    stand.kv.forget_cached()

    stand.kv.check()
    assert stand.found([1, 2, 3]) == 0
    assert stand.kv.num_free == 5
    stand.kv.commit(request, 6)
    stand.finish(request)
    stand.kv.check()
    assert stand.kv.num_free == 8
    assert (
        stand.found([1, 2, 3, 4, 5, 6, 7]) == 0
    )  # its third block has a name, but hangs in the air


# ------------------------------------------------------------------ whose, and who goes first


def test_nobody_finds_what_another_computed() -> None:
    stand = make_stand(num_blocks=32)
    prompt = [1, 2, 3, 4, 5]
    stand.serve(prompt, "a")
    stand.serve(prompt, "a", adapter="x")

    assert stand.serve(prompt, "b") == 0
    assert stand.serve(prompt, "b", adapter="x") == 0
    assert stand.serve(prompt, "a", adapter="y") == 0
    assert stand.serve(prompt, "a") == 4
    assert stand.serve(prompt, "a", adapter="x") == 4
    assert stand.serve(prompt, "b") == 4


def test_blocks_with_no_contents_worth_keeping_go_first() -> None:
    stand = make_stand(num_blocks=4)
    stand.serve([1, 2, 3, 4])  # named, freed early
    stand.serve([5])  # one block, never full

    stand.admit(stand.request([7, 7, 7]))

    assert stand.found([1, 2, 3, 4, 5]) == 4


def test_the_least_recently_used_go_first_and_the_end_of_a_sequence_before_its_start() -> None:
    stand = make_stand(num_blocks=6)
    stand.serve([1, 2, 3, 4])
    stand.serve([5, 6, 7, 8])
    stand.serve([1, 2, 3, 4, 9])  # the first is used again

    stand.admit(stand.request([7, 7, 7, 7, 7]))  # three blocks, of which two were free

    assert stand.found([5, 6, 7, 8, 9]) == 2
    assert stand.found([1, 2, 3, 4, 5]) == 4


def flood(stand: Stand, tenant: str, count: int) -> None:
    for index in range(count):
        base = 10 + 4 * (index % 20)
        stand.serve([base, base + 1, base + 2, base + 3], tenant)


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_flood_evicts_the_flooders_own_blocks_not_anothers_within_its_share(
    share: float | None,
) -> None:
    stand = make_stand(num_blocks=16, share=share)
    hot = list(range(50, 62))  # six blocks of the victim's eight
    stand.serve(hot, "victim")

    flood(stand, "flooder", 50)

    assert stand.found([*hot, 1], "victim") == 12
    assert stand.cache.num_named == 16
    assert stand.cache._parties["flooder"].num_named == 10  # whatever nobody else wants


def test_what_a_tenant_holds_beyond_its_share_goes_to_who_needs_it() -> None:
    stand = make_stand(num_blocks=16)
    hot = list(range(40, 70))  # fifteen blocks
    stand.serve(hot, "victim")

    flood(stand, "flooder", 50)

    assert (
        stand.found([*hot, 1], "victim") == 16
    )  # eight blocks: half of the pool, from the start on
    assert stand.cache._parties["flooder"].num_named == 8


def test_a_share_is_by_the_weight_of_the_tenants_newest_request() -> None:
    stand = make_stand(num_blocks=16)
    hot = list(range(40, 70))  # fifteen blocks
    stand.serve(hot, "victim", weight=3.0)

    flood(stand, "flooder", 50)

    assert stand.found([*hot, 1], "victim") == 24  # three quarters: twelve blocks
    assert stand.cache._parties["flooder"].num_named == 4
    stand.serve(hot[:2], "victim", weight=1.0)
    flood(stand, "flooder", 50)
    assert stand.cache._parties["flooder"].num_named == 8
    stand.kv.check()


def test_among_three_each_keeps_a_third() -> None:
    stand = make_stand(num_blocks=12)
    stand.serve(list(range(50, 58)), "a")
    stand.serve(list(range(60, 68)), "b")

    flood(stand, "flooder", 50)

    assert stand.found([*range(50, 58), 1], "a") == 8
    assert stand.found([*range(60, 68), 1], "b") == 8


def test_without_a_flood_a_share_bounds_nothing() -> None:
    stand = make_stand(num_blocks=16, share=0.1)
    stand.serve(list(range(60, 90)), "a")

    assert stand.found([*range(60, 90), 1], "a") == 30


def test_equal_floods_share_equally() -> None:
    stand = make_stand(num_blocks=16)
    for index in range(40):
        tenant = "ab"[index % 2]
        base = 10 + 2 * (index % 37)
        stand.serve([base, base + 1, base + 2, base], tenant)

    counts = {owner: party.num_named for owner, party in stand.cache._parties.items()}
    assert counts == {"a": 8, "b": 8}


# ------------------------------------------------------------------ the pool's part


def test_a_kept_block_is_free_but_not_handed_out() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.keep(block)
    pool.release([block])
    pool.check()

    assert (pool.num_free, pool.num_listed) == (3, 2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.take(3)
    pool.share([block])
    assert pool.num_free == 2
    pool.release([block])
    pool.unkeep(block)
    pool.check()
    assert pool.take(3) == [1, 2, 0]


def test_a_free_block_cannot_be_kept() -> None:
    pool = BlockPool(2)

    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.keep(1)


# ------------------------------------------------------------------ against a naive model


class CacheMachine(RuleBasedStateMachine):
    """Manager, cache and pool against lists: sequences as tuples, an LRU list, shares by counting.

    The reference knows contents, not names: what a block holds is (tenant, adapter, all tokens up to
    its end), so a wrong name or a stale one shows as a hit that the reference does not have.
    """

    @initialize(num_blocks=st.integers(3, 14), share=st.sampled_from([None, 0.2, 0.5]))
    def start(self, num_blocks: int, share: float | None) -> None:
        self.events: list[BlockEvent] = []
        self.stand = make_stand(num_blocks, share)
        self.stand.cache._publish = self.events.append
        self.share = share
        self.contents: dict[int, tuple[object, ...]] = {}  # named block -> what it holds
        self.idle: list[int] = []  # least recently used first
        self.written: dict[int, int] = {}  # request -> tokens

    def key(self, request: Request, index: int) -> tuple[object, ...]:
        generate = request.generate
        tokens = tuple(request.token_ids[: (index + 1) * SIZE])
        return (generate.tenant_id, generate.adapter_digest, tokens)

    def expected_hit(self, request: Request) -> list[int]:
        where = {content: block for block, content in self.contents.items()}
        blocks = []
        for index in range((request.num_tokens - 1) // SIZE):
            block = where.get(self.key(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def evict(self, count: int, taker: Request, num_taken: int) -> None:
        """`count` idle blocks go because `taker` takes `num_taken`."""
        held = [
            request.generate.tenant_id
            for request in self.stand.running
            if request is not taker
            for block in self.stand.kv._tables[request.seq].blocks
            if block not in self.contents
        ]
        held += [taker.generate.tenant_id] * num_taken
        for _ in range(count):
            owners = [str(content[0]) for content in self.contents.values()] + held
            limit = (
                self.stand.pool.num_blocks / len(set(owners))
                if self.share is None
                else self.share * self.stand.pool.num_blocks
            )
            over = {
                owner: owners.count(owner)
                for owner in {str(self.contents[block][0]) for block in self.idle}
                if owners.count(owner) > limit
            }
            most = max(over.values(), default=0)
            furthest = [owner for owner, number in over.items() if number == most]
            candidates = [
                block for block in self.idle if not over or str(self.contents[block][0]) in furthest
            ]
            # Which of two that are equally far over goes first is not part of the promise.
            victim = next(b for b in candidates if not self.stand.cache.is_named(b))
            if len(furthest) < 2:
                assert victim == candidates[0], "not the least recently used"
            self.idle.remove(victim)
            del self.contents[victim]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        tenant=st.sampled_from("abc"),
        adapter=st.sampled_from([None, "x"]),
    )
    def admit(self, prompt: list[int], tenant: str, adapter: str | None) -> None:
        stand = self.stand
        request = stand.request(prompt, tenant, adapter)
        hit = stand.kv.lookup(request)
        expected = self.expected_hit(request)
        assert list(hit.blocks) == expected
        assert hit.num_tokens == len(expected) * SIZE < request.num_tokens
        assert hit.num_idle == sum(block in self.idle for block in expected)
        missing = stand.kv.num_missing(hit, request.num_tokens)
        if missing > stand.kv.num_free:
            return
        listed = stand.pool.num_listed
        blocks, copy = stand.kv.admit(request, hit, request.num_tokens)
        assert copy is None
        request.status = RequestStatus.RUNNING
        stand.running.append(request)
        self.idle = [block for block in self.idle if block not in expected]
        num_taken = len(blocks) - len(expected)
        self.evict(max(0, num_taken - listed), request, num_taken)
        assert not {*blocks[len(expected) :]} & set(self.contents), "a named block was handed out"
        self.written[request.seq] = hit.num_tokens

    @precondition(lambda self: self.stand.running)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        request = data.draw(st.sampled_from(self.stand.running))
        written = min(self.written[request.seq] + count, request.num_tokens)
        self.stand.kv.commit(request, written)
        table = self.stand.kv._tables[request.seq].blocks
        known = set(self.contents.values())
        for index in range(self.written[request.seq] // SIZE, written // SIZE):
            if self.key(request, index) not in known:
                self.contents[table[index]] = self.key(request, index)
        self.written[request.seq] = written

    @precondition(lambda self: self.stand.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.stand.running))
        listed = self.stand.pool.num_listed
        table = self.stand.kv._tables[request.seq].blocks
        unnamed = sum(block not in self.contents for block in table)
        blocks = self.stand.kv.grow(request.seq, request.num_tokens + 1)
        if blocks is not None:
            request.token_ids.append(token)
            self.evict(max(0, len(blocks) - listed), request, unnamed + len(blocks))

    @precondition(lambda self: self.stand.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Ends, or is preempted: it is the same to the cache."""
        request = data.draw(st.sampled_from(self.stand.running))
        table = list(self.stand.kv._tables[request.seq].blocks)
        self.stand.finish(request)
        for block in reversed(table):
            if block in self.contents and self.stand.pool.num_holders(block) == 0:
                self.idle.append(block)

    @rule()
    def clear(self) -> None:
        self.stand.kv.forget_cached()
        self.contents.clear()
        self.idle.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "stand"):
            return
        self.stand.kv.check()
        assert set(self.contents) == set(self.stand.cache._named)
        assert self.idle == list(self.stand.cache._idle)


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_the_cache_agrees_with_a_naive_model = CacheMachine.TestCase


class LongCacheMachine(CacheMachine):
    """The same for longer."""


LongCacheMachine.TestCase.settings = settings(
    CacheMachine.TestCase.settings, max_examples=500, stateful_step_count=80
)
test_the_cache_agrees_with_a_naive_model_for_long = pytest.mark.slow(
    pytest.mark.timeout(3_600)(LongCacheMachine.TestCase)
)
