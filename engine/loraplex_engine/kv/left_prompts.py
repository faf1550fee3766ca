"""Which of the prompts that ended choices have left are to go, when somebody needs their room.

What goes is computed anew by who waits for it; so nothing goes unless all that goes together makes the room,
and no more goes than that takes. A block counts only if nobody else holds it: neither a request that runs
nor a prompt that stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence


def choose_to_drop(
    left: Mapping[int, Sequence[int]],
    num_blocks: int,
    num_holders: Callable[[int], int],
    no_gain: Collection[int] = (),
) -> list[int]:
    """The keys whose blocks make at least `num_blocks` more blocks free.

    Args:
        left: each prompt's blocks, in the order in which they are to go.
        num_holders: of a block, each prompt that holds it included.
        no_gain: blocks that who asks would hold again.

    Returns:
        A set none of which can be spared, in order; empty if all together are too few.
    """
    if sum(map(len, left.values())) < num_blocks:
        return []  # the quick answer: this is asked in each step while a request waits for room
    no_gain = frozenset(no_gain)
    num_dropped: Counter[int] = Counter()  # holders of each block that are to go
    chosen: list[int] = []
    gain = 0

    def freed_of(key: int) -> int:
        """How many of a chosen prompt's blocks nobody holds once the chosen ones are gone."""
        return sum(
            num_dropped[block] == num_holders(block) and block not in no_gain for block in left[key]
        )

    for key, blocks in left.items():
        num_dropped.update(blocks)
        chosen.append(key)
        gain += freed_of(key)
        if gain >= num_blocks:
            break
    else:
        return []
    # The last one is needed, or it would not have been looked at; of the others the last are spared first.
    for key in chosen[-2::-1]:
        loss = freed_of(key)
        if gain - loss >= num_blocks:
            gain -= loss
            num_dropped.subtract(left[key])
            chosen.remove(key)
    return chosen
