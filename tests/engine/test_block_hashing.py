"""Names of blocks: everything that changes keys and values, or whose they are, changes the name."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loraplex_engine.kv.hashing import BlockChain, BlockHasher

from tests.support.engine_fakes import digest

PROMPT = list(range(100, 112))  # three blocks of four


def hasher(**changes: object) -> BlockHasher:
    fields: dict[str, object] = {
        "model_fingerprint": "sha256:m",
        "kv_format": "torch/block4/float32",
        "block_size": 4,
    }
    return BlockHasher(**(fields | changes))  # type: ignore[arg-type] # by keyword, as in production


def names(
    prompt: list[int] | None = None,
    *,
    by: BlockHasher | None = None,
    owner: str = "t",
    salt: bytes = b"salt",
    adapter: str | None = None,
) -> list[bytes]:
    prompt = PROMPT if prompt is None else prompt
    made_by = by or hasher()
    chain = made_by.chain(prompt, owner=owner, salt=salt, adapter_digest=adapter)
    chain.extend(prompt, len(prompt) // made_by.block_size)
    return chain.names


def test_a_name_is_a_sha256_and_the_same_each_time() -> None:
    """Fault 32: no process-local and no craftable hash."""
    first, again = names(), names()

    assert first == again
    assert len(set(first)) == 3
    assert {len(name) for name in first} == {hashlib.sha256().digest_size}


def test_names_are_as_documented_so_that_a_router_can_compute_them() -> None:
    """Spelt out: whoever changes this needs a new topic in `block_events`."""

    def tagged(tag: bytes, value: bytes = b"") -> bytes:
        return tag + len(value).to_bytes(8, "little") + value

    common = (
        tagged(b"M", b"sha256:m")
        + tagged(b"K", b"torch/block4/float32")
        + tagged(b"B", b"4")
        + tagged(b"S", b"salt")
        + tagged(b"N")
    )
    tokens = [b"".join(t.to_bytes(4, "little") for t in PROMPT[i : i + 4]) for i in (0, 4, 8)]
    expected = [hashlib.sha256(common + tagged(b"F") + tagged(b"T", tokens[0])).digest()]
    for block in tokens[1:]:
        fields = common + tagged(b"R", expected[-1]) + tagged(b"T", block)
        expected.append(hashlib.sha256(fields).digest())

    assert names() == expected


@pytest.mark.parametrize(
    "other",
    [
        names(by=hasher(model_fingerprint="sha256:n")),
        names(by=hasher(kv_format="torch/block4/bfloat16")),
        names(salt=b"other"),
        names(adapter=digest("a")),
    ],
    ids=["model", "format", "tenant", "adapter"],
)
def test_whatever_changes_contents_or_owner_changes_every_name(other: list[bytes]) -> None:
    assert not set(names()) & set(other)


def test_a_name_covers_everything_before_the_block() -> None:
    """Fault: chains that compare a block's own tokens only."""
    changed = [1, *PROMPT[1:]]

    assert not set(names()) & set(names(changed))


def test_the_same_block_elsewhere_in_a_sequence_is_another_block() -> None:
    assert len(set(names([7] * 16))) == 4


def test_sequences_share_names_up_to_where_they_part() -> None:
    other = [*PROMPT[:8], 1, 2, 3, 4]

    assert names(other)[:2] == names()[:2]
    assert names(other)[2] != names()[2]


@pytest.mark.parametrize("x", [digest("x"), "X", ""])
def test_a_salt_is_never_an_adapter(x: str) -> None:
    """Fault 34: untagged keys let salt "X" and adapter "X" share."""
    with_adapter = names(salt=b"", adapter=x)
    with_salt = names(salt=x.encode(), adapter=None)

    assert not set(with_adapter) & set(with_salt)


def test_fields_do_not_flow_into_each_other() -> None:
    assert not set(names(salt=b"ab", adapter="c")) & set(names(salt=b"a", adapter="bc"))
    one, other = hasher(model_fingerprint="ab"), hasher(model_fingerprint="a")
    assert not set(names(by=one)) & set(names(by=other))


def test_a_chain_grows_and_hashes_no_block_twice() -> None:
    chain = hasher().chain(PROMPT, owner="t", salt=b"salt", adapter_digest=None)
    hashed: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, key: object) -> object:  # type: ignore[override] # slices only
            assert isinstance(key, slice)
            hashed.extend(range(key.start, key.stop))
            return list.__getitem__(self, key)

    sequence = Watched([*PROMPT, 1, 2, 3, 4, 5])
    for count in (1, 1, 3, 2, 4, 4):
        chain.extend(sequence, count)

    assert chain.names == names([*PROMPT, 1, 2, 3, 4])
    assert hashed == list(range(16))


def test_forks_continue_apart() -> None:
    chain = hasher().chain(PROMPT, owner="t", salt=b"salt", adapter_digest=None)
    chain.extend([*PROMPT, 1, 1, 1, 1], 4)

    other = chain.fork(3)
    other.extend([*PROMPT, 2, 2, 2, 2], 4)

    assert other.names[:3] == chain.names[:3]
    assert other.names[3:] == names([*PROMPT, 2, 2, 2, 2])[3:]
    assert other.names[3] != chain.names[3]


def test_only_full_blocks_have_names() -> None:
    chain = hasher().chain(PROMPT[:6], owner="t", salt=b"salt", adapter_digest=None)

    with pytest.raises(AssertionError, match="only a full block"):
        chain.extend(PROMPT[:6], 2)


# ------------------------------------------------------------------ public prefixes


def public_chain(prompt: list[int], tenant: str, adapter: str | None = None) -> BlockChain:
    made_by = hasher(public_prefixes=[PROMPT[:10], [9, 9, 9, 9]])
    chain = made_by.chain(prompt, owner=tenant, salt=tenant.encode(), adapter_digest=adapter)
    chain.extend(prompt, len(prompt) // 4)
    return chain


def test_blocks_wholly_inside_a_public_prefix_have_one_name_for_all_tenants() -> None:
    a, b = public_chain(PROMPT, "a"), public_chain(PROMPT, "b")

    assert (a.num_public, b.num_public) == (2, 2)  # ten tokens: the third block is not inside
    assert a.names[:2] == b.names[:2]
    assert a.names[2] != b.names[2]


def test_a_public_prefix_is_another_one_for_each_adapter() -> None:
    base, adapted = public_chain(PROMPT, "a"), public_chain(PROMPT, "a", digest("x"))

    assert adapted.num_public == 2
    assert not set(base.names) & set(adapted.names)
    assert adapted.names[:2] == public_chain(PROMPT, "b", digest("x")).names[:2]


def test_what_parts_from_the_public_prefix_early_shares_what_lies_before() -> None:
    other = [*PROMPT[:7], 1, *PROMPT[8:]]

    assert public_chain(other, "a").num_public == 1
    assert public_chain([1, *PROMPT], "a").num_public == 0
    assert public_chain([9, 9, 9, 9, 9, 9, 9, 9], "a").num_public == 1


def test_an_answer_that_repeats_a_public_prefix_is_private_all_the_same() -> None:
    chain = hasher(public_prefixes=[PROMPT]).chain(
        PROMPT[:4], owner="a", salt=b"a", adapter_digest=None
    )
    chain.extend(PROMPT, 3)

    assert chain.num_public == 1
    assert chain.names[1] not in names(by=hasher(public_prefixes=[PROMPT]))


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=0, max_size=20),
    prefixes=st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=3),
)
def test_public_blocks_hold_nothing_but_declared_tokens(
    prompt: list[int], prefixes: list[list[int]]
) -> None:
    chain = hasher(public_prefixes=prefixes).chain(
        prompt, owner="a", salt=b"a", adapter_digest=None
    )

    public = prompt[: chain.num_public * 4]
    assert chain.num_public == max(
        [
            count
            for prefix in prefixes
            for count in range(len(prompt) // 4 + 1)
            if len(prefix) >= 4 * count and prefix[: 4 * count] == prompt[: 4 * count]
        ],
        default=0,
    )
    assert not public or any(prefix[: len(public)] == public for prefix in prefixes)
