"""Which block holds which named contents, and which of them goes when room is needed.

Owns names, owners and the order of eviction; block numbers belong to `BlockPool`, tables to `KvManager`.
A named block is *held* (in somebody's table) or *idle* (in nobody's: free, with contents worth keeping).

When a block is needed and no free one is without a name, an idle block goes:
1. of the owner furthest over its share, its least recently used one;
2. if nobody is over its share: the least recently used of all.
What an owner has is its named blocks and those in its requests' tables, the ones about to be taken
included: so a tenant that floods the cache evicts its own blocks first, and what others keep within their
shares stays. A share bounds nothing while there is room; it only says who goes first. Where a tenant's
running requests alone take more than its share, they are served all the same, from rule 2.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from loraplex_engine.block_events import BlockEvent, BlockRemoved, BlockStored, Cleared
from loraplex_engine.kv.hashing import BlockChain, BlockHasher, BlockName

Owner = str | None  # a tenant; None: everybody, a public prefix
_NOBODY: frozenset[int] = frozenset()


@dataclass(slots=True)
class _Party:
    """What one owner has."""

    num_named: int = 0
    num_unnamed: int = 0  # in tables, not findable
    weight: float = 1.0  # of its share, beside those of the others
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # least recently used first

    @property
    def num_blocks(self) -> int:
        return self.num_named + self.num_unnamed


class PrefixCache:
    """All calls are O(blocks named), but `evict`, which is also O(owners).

    Args:
        tenant_share: of all blocks, that each owner may keep; None: all of them are split among the
            owners that have any, by the weights of their newest requests.
        publish: is told of each change, in order.
    """

    def __init__(
        self,
        hasher: BlockHasher,
        num_blocks: int,
        *,
        tenant_share: float | None = None,
        publish: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.hasher = hasher
        # Counted once per request: its prompt's tokens, and those of them that were found.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._num_blocks = num_blocks
        self._tenant_share = tenant_share
        self._publish = publish
        self._block_of: dict[BlockName, int] = {}
        self._named: dict[int, tuple[BlockName, Owner]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._parties: dict[Owner, _Party] = {}
        self._total_weight: float | None = None  # of the parties; None: to be counted
        self._expected: dict[BlockName, set[int]] = {}  # who promised each

    @property
    def num_named(self) -> int:
        return len(self._named)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def names(self) -> set[BlockName]:
        """Everything that can be found now."""
        return set(self._block_of)

    def is_named(self, block: int) -> bool:
        return block in self._named

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def is_known(self, name: BlockName) -> bool:
        """Whether some block has this name."""
        return name in self._block_of

    def name_of(self, block: int) -> BlockName | None:
        return self._named[block][0] if block in self._named else None

    # ------------------------------------------------------------------ finding

    def find(self, names: Sequence[BlockName], limit: int) -> list[int]:
        """The blocks of the longest run of known names from the first on, at most `limit`."""
        blocks = []
        for index in range(limit):
            block = self._block_of.get(names[index])
            if block is None:
                break  # what comes after a hole was computed from something that is gone
            blocks.append(block)
        return blocks

    def store(self, chain: BlockChain, index: int, block: int) -> bool:
        """Make a held block findable under the chain's name for it.

        Returns:
            False: another block has that name already, so this one needs none.
        """
        name = chain.names[index]
        if name in self._block_of:
            return False
        assert block not in self._named, f"block {block} has a name already"
        owner = None if index < chain.num_public else chain.owner
        self._block_of[name] = block
        self._named[block] = (name, owner)
        self.note_unnamed(chain.owner, -1)
        self._party(owner).num_named += 1
        if self._publish is not None:
            self._publish(
                BlockStored(
                    name=name,
                    parent=chain.names[index - 1] if index else None,
                    num_tokens=self.hasher.block_size,
                    adapter_digest=chain.adapter_digest,
                )
            )
        return True

    # ------------------------------------------------------------------ what is being computed

    def expect(self, name: BlockName, by: int) -> None:
        """The running request of this key is about to compute the block of this name."""
        self._expected.setdefault(name, set()).add(by)

    def stop_expecting(self, name: BlockName, by: int) -> None:
        """It has, or it never will."""
        self._expected[name].remove(by)
        if not self._expected[name]:
            del self._expected[name]

    @property
    def num_unnamed(self) -> int:
        """Blocks without a name in tables, over all owners."""
        return sum(party.num_unnamed for party in self._parties.values())

    def expected_by(self, name: BlockName) -> Set[int]:
        """The keys of those who are about to compute the block of this name."""
        return self._expected.get(name, _NOBODY)

    @property
    def num_expected(self) -> int:
        """Promises outstanding."""
        return sum(len(keys) for keys in self._expected.values())

    # ------------------------------------------------------------------ use and eviction

    def note_unnamed(self, owner: Owner, change: int, *, weight: float | None = None) -> None:
        """So many blocks without a name more (or fewer) are in an owner's tables, or about to be.

        Args:
            weight: the owner's from now on; None: as before.
        """
        party = self._party(owner)
        if weight is not None and party.weight != weight:
            party.weight = weight
            self._total_weight = None
        party.num_unnamed += change
        assert party.num_unnamed >= 0, f"{owner} gave back more than it took"
        if not party.num_blocks:
            self._drop_party(owner)

    def note_held(self, block: int) -> None:
        """A named block that was idle is in a table again."""
        del self._idle[block]
        del self._parties[self._named[block][1]].idle[block]

    def note_idle(self, block: int) -> None:
        """A named block left its last table: the most recently used of all."""
        self._idle[block] = None
        self._parties[self._named[block][1]].idle[block] = None

    def evict(self, count: int) -> list[int]:
        """Take the names from `count` idle blocks, in the order of the module's header."""
        assert count <= len(self._idle), f"{count} to evict, {len(self._idle)} idle"
        over = [
            (self._share(party) - party.num_blocks, order, owner)
            for order, (owner, party) in enumerate(self._parties.items())
            if party.num_blocks > self._share(party)
        ]
        heapify(over)
        evicted: list[int] = []
        while len(evicted) < count:
            idle = self._idle
            if over:
                _, order, owner = over[0]
                party = self._parties.get(owner)
                if party is None or not party.idle or party.num_blocks <= self._share(party):
                    heappop(over)
                    continue
                idle = party.idle
                heapreplace(over, (self._share(party) + 1 - party.num_blocks, order, owner))
            block = next(iter(idle))
            self._forget(block)
            evicted.append(block)
        return evicted

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that had a name. Held ones stay where they are."""
        blocks = list(self._named)
        self._block_of.clear()
        self._named.clear()
        self._idle.clear()
        self._parties = {
            owner: _Party(num_unnamed=party.num_unnamed, weight=party.weight)
            for owner, party in self._parties.items()
            if party.num_unnamed
        }
        self._total_weight = None
        if self._publish is not None:
            self._publish(Cleared())
        return blocks

    def _share(self, party: _Party) -> float:
        """Blocks that an owner keeps while others need room."""
        if self._tenant_share is not None:
            return self._tenant_share * self._num_blocks
        if self._total_weight is None:
            self._total_weight = sum(party.weight for party in self._parties.values())
        return self._num_blocks * party.weight / self._total_weight

    def _party(self, owner: Owner) -> _Party:
        party = self._parties.get(owner)
        if party is None:
            party = self._parties[owner] = _Party()
            self._total_weight = None
        return party

    def _drop_party(self, owner: Owner) -> None:
        del self._parties[owner]
        self._total_weight = None

    def _forget(self, block: int) -> None:
        """Take an idle block's name away."""
        name, owner = self._named.pop(block)
        del self._block_of[name]
        del self._idle[block]
        party = self._parties[owner]
        del party.idle[block]
        party.num_named -= 1
        if not party.num_blocks:
            self._drop_party(owner)
        if self._publish is not None:
            self._publish(BlockRemoved(name=name))

    def check(self) -> None:
        """Assert that names, owners and idle lists agree."""
        assert {name: block for block, (name, _) in self._named.items()} == self._block_of
        owners = Counter(owner for _, owner in self._named.values())
        assert owners == Counter({o: party.num_named for o, party in self._parties.items()})
        assert all(party.num_blocks > 0 for party in self._parties.values())
        idle_of = Counter(self._named[block][1] for block in self._idle)
        for owner, party in self._parties.items():
            assert len(party.idle) == idle_of[owner], f"{owner}'s idle blocks are not in order"
            assert [b for b in self._idle if b in party.idle] == list(party.idle)
