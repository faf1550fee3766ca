"""Assignment: monotone, even, the same everywhere, and about the right subject."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loraplex_platform.rollouts.assignment import (
    MAX_HASHED_CHARS,
    NUM_BUCKETS,
    Subject,
    assign,
    bucket,
    chooses_canary,
    subject_of,
)

TENANT, OTHER_TENANT = UUID(int=0xA), UUID(int=0xB)
KEY, OTHER_KEY = UUID(int=0x1A), UUID(int=0x1B)
SALT, OTHER_SALT = b"salt of one rollout", b"salt of another"
NUM_SUBJECTS = 100_000
HELLO = [("system", "Be terse."), ("user", "Hello!")]

subjects = st.builds(
    Subject,
    st.sampled_from(["tenant", "key", "user", "conversation"]),
    st.uuids(),
    st.binary(max_size=40),
)


def user(number: int, tenant_id: UUID = TENANT) -> Subject:
    return subject_of("user", tenant_id=tenant_id, key_id=KEY, user=f"user-{number}")


@pytest.fixture(scope="module")
def buckets() -> np.ndarray:
    return np.array([bucket(SALT, user(number)) for number in range(NUM_SUBJECTS)])


# ---------------------------------------------------------------------------- shares


def test_every_weight_gets_its_share_within_half_a_point(buckets: np.ndarray) -> None:
    shares = [float((buckets < 100 * percent).mean()) for percent in range(101)]

    assert shares == pytest.approx([percent / 100 for percent in range(101)], abs=0.005)
    assert shares[0] == 0
    assert shares[100] == 1


def test_raising_the_weight_moves_nobody_back() -> None:
    for number in range(200):
        chosen = [chooses_canary(SALT, user(number), weight) for weight in range(0, 10_001, 100)]

        assert chosen == sorted(chosen)


def test_the_weight_is_compared_in_basis_points(buckets: np.ndarray) -> None:
    for number in range(2_000):
        mine = int(buckets[number])

        assert not chooses_canary(SALT, user(number), mine)
        assert chooses_canary(SALT, user(number), mine + 1)


@pytest.mark.parametrize("weight_bp", [-1, 10_001])
def test_a_weight_out_of_range_is_refused(weight_bp: int) -> None:
    with pytest.raises(ValueError, match=r"weight_bp is .*0 .*10000"):
        chooses_canary(SALT, user(1), weight_bp)


def test_another_salt_draws_anew(buckets: np.ndarray) -> None:
    others = np.array([bucket(OTHER_SALT, user(number)) for number in range(NUM_SUBJECTS)])

    # Of 100,000 independent pairs the correlation stays within 4/sqrt(100,000), and of those in one rollout's
    # five percent as many as of all are in the other's.
    assert abs(np.corrcoef(buckets, others)[0, 1]) < 4 / NUM_SUBJECTS**0.5
    in_both = (others[buckets < 500] < 500).mean()
    assert in_both == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / 5_000) ** 0.5)
    keys = {assign(salt, user(7)).subject_key for salt in (SALT, OTHER_SALT)}
    assert len(keys) == 2


def test_other_tenants_users_of_the_same_name_are_others(buckets: np.ndarray) -> None:
    others = [bucket(SALT, user(number, OTHER_TENANT)) for number in range(20_000)]

    assert abs(np.corrcoef(buckets[:20_000], others)[0, 1]) < 4 / 20_000**0.5


# ---------------------------------------------------------------------------- the same everywhere


def test_three_processes_agree(buckets: np.ndarray) -> None:
    code = f"""
import hashlib, sys
from uuid import UUID
from loraplex_platform.rollouts.assignment import bucket, subject_of
tenant, key = UUID(int=0xA), UUID(int=0x1A)
digest = hashlib.sha256()
for number in range({NUM_SUBJECTS}):
    subject = subject_of("user", tenant_id=tenant, key_id=key, user=f"user-{{number}}")
    digest.update(bucket({SALT!r}, subject).to_bytes(2, "big"))
print(hash("a") % 10**9, digest.hexdigest())
"""
    answers = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(done.stdout.split())

    here = hashlib.sha256(b"".join(int(one).to_bytes(2, "big") for one in buckets)).hexdigest()
    assert {answer[1] for answer in answers} == {here}
    assert len({answer[0] for answer in answers}) == 3  # the processes do differ


def test_the_bytes_are_those_that_are_documented() -> None:
    """By another hand: a gateway of another make would have to do this."""
    fields = [b"loraplex.rollout.1", SALT, b"user", TENANT.bytes, b"user-1"]
    digest = hashlib.sha256(b"".join(struct.pack(">I", len(one)) + one for one in fields)).digest()

    found = assign(SALT, user(1))

    assert found.bucket == int.from_bytes(digest[:4], "big") % 10_000
    assert found.subject_key == int.from_bytes(digest[4:12], "big", signed=True)


def test_known_subjects_stay_in_their_buckets() -> None:
    """A release that moved them would move every subject of a rollout in progress."""
    found = [bucket(SALT, user(number)) for number in range(5)]
    conversation = subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=HELLO)

    assert found == KNOWN_USERS
    assert bucket(SALT, conversation) == KNOWN_CONVERSATION


KNOWN_USERS = [7533, 1451, 4525, 6796, 8566]
KNOWN_CONVERSATION = 6922


@given(st.binary(max_size=40), subjects, st.binary(max_size=40), subjects)
def test_no_two_pairs_share_an_input(
    salt: bytes, subject: Subject, other_salt: bytes, other: Subject
) -> None:
    is_same = (salt, subject) == (other_salt, other)

    found = assign(salt, subject)

    assert (found == assign(other_salt, other)) == is_same
    assert 0 <= found.bucket < NUM_BUCKETS
    assert -(2**63) <= found.subject_key < 2**63


def test_bytes_moved_between_salt_and_subject_are_another_pair() -> None:
    assert assign(b"ab", Subject("user", TENANT, b"c")) != assign(
        b"a", Subject("user", TENANT, b"bc")
    )


# ---------------------------------------------------------------------------- subjects


def test_a_tenants_keys_and_users_are_one_subject_under_tenant() -> None:
    one = subject_of("tenant", tenant_id=TENANT, key_id=KEY, user="a")
    other = subject_of("tenant", tenant_id=TENANT, key_id=OTHER_KEY, user="b")

    assert one == other
    assert one != subject_of("tenant", tenant_id=OTHER_TENANT, key_id=KEY)


@pytest.mark.parametrize("name", [None, ""])
def test_a_request_that_names_no_user_goes_by_its_key(name: str | None) -> None:
    found = subject_of("user", tenant_id=TENANT, key_id=KEY, user=name)

    assert found == subject_of("key", tenant_id=TENANT, key_id=KEY)
    assert found.kind == "key"
    assert found != subject_of("user", tenant_id=TENANT, key_id=OTHER_KEY, user=name)


def test_a_user_is_the_same_behind_every_key_of_the_tenant() -> None:
    one, other = (
        subject_of("user", tenant_id=TENANT, key_id=key, user="ana") for key in (KEY, OTHER_KEY)
    )

    assert one == other


def test_later_turns_of_a_conversation_stay() -> None:
    later = [*HELLO, ("assistant", "Hi."), ("system", "Now be kind."), ("user", "Thanks")]
    one, other = (
        subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=iter(messages))
        for messages in (HELLO, later)
    )

    assert one == other
    assert one.kind == "conversation"


@pytest.mark.parametrize(
    "messages",
    [
        [("system", "Be terse."), ("user", "Hello?")],
        [("system", "Be terse.!"), ("user", "Hello!")],
        [("user", "Hello!")],
        [("user", "Be terse."), ("user", "Hello!")],
        [("system", ""), ("user", "Hello!")],
        [("system", "Be terse.Hello!"), ("user", "")],
    ],
)
def test_another_beginning_is_another_conversation(messages: list[tuple[str, str]]) -> None:
    one, other = (
        subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=given)
        for given in (HELLO, messages)
    )

    assert one != other


def test_a_developers_message_is_a_system_message() -> None:
    one, other = (
        subject_of(
            "conversation",
            tenant_id=TENANT,
            key_id=KEY,
            messages=[(role, "Be terse."), ("user", "Hello!")],
        )
        for role in ("system", "developer")
    )

    assert one == other


def test_a_stated_conversation_beats_its_beginning_and_cannot_be_taken_for_one() -> None:
    stated = subject_of(
        "conversation", tenant_id=TENANT, key_id=KEY, conversation_id="c-1", messages=HELLO
    )

    begun = subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=HELLO)
    assert stated == subject_of(
        "conversation", tenant_id=TENANT, key_id=OTHER_KEY, conversation_id="c-1"
    )
    assert stated != begun
    assert b"c-1" in stated.identity


@pytest.mark.parametrize("messages", [[], [("system", "Be terse.")], [("assistant", "Hi.")]])
def test_without_a_users_message_a_conversation_goes_by_its_key(
    messages: list[tuple[str, str]],
) -> None:
    found = subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=messages)

    assert found == subject_of("key", tenant_id=TENANT, key_id=KEY)


def test_of_long_texts_the_beginning_and_the_length_count() -> None:
    book = "word " * MAX_HASHED_CHARS

    def begun(text: str) -> Subject:
        return subject_of("conversation", tenant_id=TENANT, key_id=KEY, messages=[("user", text)])

    assert begun(book) != begun(book + "!")
    assert begun(book) != begun("W" + book[1:])


def test_text_that_is_no_unicode_is_a_subject_too() -> None:
    found = subject_of("user", tenant_id=TENANT, key_id=KEY, user="\ud800")

    assert 0 <= bucket(SALT, found) < NUM_BUCKETS
