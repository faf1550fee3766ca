"""The Lua scripts against a model in Python, on a real Redis whose clock the test turns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loraplex_platform.rates import scripts
from loraplex_platform.rates.bucket import NEVER, Bucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loraplex_platform.rates.scripts import Script

LEASE_MS = 20_000
EPOCH = "run-1"
_ids = itertools.count()


@dataclass
class Limit:
    """One limit and its model."""

    kind: str
    per_minute: int
    burst: int
    bucket: Bucket = field(init=False)
    places: dict[str, int] = field(default_factory=dict)  # id -> until, in microseconds

    def __post_init__(self) -> None:
        self.bucket = Bucket(self.per_minute, self.burst)

    def wait_us(self, amount: int, now_us: int) -> int:
        if self.kind == "b":
            return self.bucket.wait_us(amount, now_us)
        if self.burst < amount:
            return NEVER
        return 0 if self.num_free(now_us) >= amount else 1_000_000

    def num_free(self, now_us: int) -> int:
        return self.burst - sum(until > now_us for until in self.places.values())


class Server:
    """A tenant's limits in Redis, with a clock of its own."""

    def __init__(self, client: redis.Redis, limits: list[Limit], tag: str) -> None:
        self.client = client
        self.limits = limits
        self.tag = tag
        self.now_us = 1_800_000_000_000_000
        self.client.set(self.key("epoch"), EPOCH)

    def key(self, name: str) -> str:
        return f"{{{self.tag}}}:{name}"

    def run(self, script: Script, keys: list[str], args: list[Any]) -> Any:
        clock = (
            f"{{string.format('%.0f', {self.now_us // 1_000_000}), '{self.now_us % 1_000_000}'}}"
        )
        text = script.text.replace("redis.call('TIME')", clock)
        assert text != script.text
        return self.client.eval(text, len(keys), *keys, *args)

    def admit(
        self,
        id_: str,
        amounts: list[int],
        *,
        mode: str = "take",
        epoch: str = EPOCH,
        versions: tuple[int, int, int] = (1, 1, 1),
    ) -> tuple[str, list[tuple[int, int, int]]]:
        keys = [self.key("v"), self.key("epoch"), self.key(f"a:{id_}"), *self.limit_keys]
        shapes = zip(self.limits, amounts, strict=True)
        flat = [v for limit, n in shapes for v in (limit.kind, limit.per_minute, limit.burst, n)]
        args = [id_, epoch, "key-1", *versions, mode, LEASE_MS, 900_000, *flat]
        echo, verdict, *rest = self.run(scripts.ADMIT, keys, args)
        assert echo.decode() == id_
        views = [tuple(rest[i : i + 3]) for i in range(0, len(rest), 3)]
        return verdict.decode(), views

    def release(self, id_: str, refunds: list[int]) -> int:
        shapes = zip(self.limits, refunds, strict=True)
        flat = [v for limit, n in shapes for v in (limit.kind, limit.per_minute, limit.burst, n)]
        keys = [self.key(f"a:{id_}"), *self.limit_keys]
        return int(self.run(scripts.RELEASE, keys, [id_, *flat]))

    @property
    def limit_keys(self) -> list[str]:
        return [self.key(f"l{i}") for i in range(len(self.limits))]


@pytest.fixture(scope="module")
def client(_redis_server_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(_redis_server_url, db=5) as connection:
        connection.flushdb()
        yield connection
        connection.flushdb()


def server(client: redis.Redis, *limits: Limit) -> Server:
    return Server(client, list(limits), f"t{next(_ids)}")


LIMITS = st.lists(
    st.one_of(
        st.builds(
            Limit,
            st.just("b"),
            st.sampled_from([0, 1, 7, 60, 1000, 10**6, 10**9]),
            st.sampled_from([0, 1, 5, 60, 10**6]),
        ),
        st.builds(Limit, st.just("c"), st.just(0), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=4,
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "again", "release", "over", "look"]),
        st.lists(st.integers(0, 40), min_size=4, max_size=4),
        # The clock stands, runs, leaps, and is put back.
        st.sampled_from([0, 1, 999, 10**6, 7 * 10**6, 61 * 10**6, 3600 * 10**6, -3600 * 10**6]),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(LIMITS, STEPS)
def test_the_script_and_the_model_agree_after_any_sequence(
    client: redis.Redis, limits: list[Limit], steps: list[tuple[str, list[int], int]]
) -> None:
    for limit in limits:
        limit.bucket, limit.places = Bucket(limit.per_minute, limit.burst), {}
    real = server(client, *limits)
    admitted: dict[str, list[int]] = {}
    for number, (action, drawn, elapsed_us) in enumerate(steps):
        real.now_us += elapsed_us
        now_us = real.now_us
        amounts = [1 if x.kind == "c" else n for x, n in zip(limits, drawn, strict=False)]
        if action in ("release", "over") and admitted:
            id_, taken = admitted.popitem()
            # All back, or more used than was thought.
            refunds = [n if action == "release" else -n for n in taken]
            assert real.release(id_, refunds) == 1
            assert real.release(id_, refunds) == 0
            for limit, back in zip(limits, refunds, strict=True):
                limit.places.pop(id_, None)
                if limit.kind == "b" and back and limit.per_minute > 0:
                    limit.bucket.take(-back, now_us)
            continue
        if action == "again" and admitted:
            id_ = next(iter(admitted))
            verdict, views = real.admit(id_, admitted[id_])
            assert verdict == "OK"
        else:
            id_ = f"r{number}"
            waits = [x.wait_us(n, now_us) for x, n in zip(limits, amounts, strict=True)]
            verdict, views = real.admit(id_, amounts, mode="look" if action == "look" else "take")
            assert verdict == ("FULL" if any(waits) else "OK")
            assert [view[2] for view in views] == waits
            if verdict == "OK" and action != "look":
                admitted[id_] = amounts
                for limit, amount in zip(limits, amounts, strict=True):
                    if limit.kind == "b":
                        limit.bucket.take(amount, now_us)
                    else:
                        # What is over is forgotten, also should the clock be put back.
                        limit.places = {k: v for k, v in limit.places.items() if v > now_us}
                        limit.places[id_] = now_us + LEASE_MS * 1000
        for limit, (remaining, reset_us, _) in zip(limits, views, strict=True):
            if limit.kind == "b":
                assert remaining == max(0, int(limit.bucket.level_at(now_us)))
                assert reset_us == limit.bucket.reset_us(now_us)
            else:
                assert remaining == max(0, limit.num_free(now_us))


def test_a_refusal_burns_nothing(client: redis.Redis) -> None:
    real = server(client, Limit("b", 60, 10), Limit("c", 0, 1), Limit("b", 1000, 100))
    real.admit("a", [1, 1, 10])

    refused = [real.admit(f"b{i}", [1, 1, 10]) for i in range(20)]
    real.release("a", [0, 0, 0])
    verdict, views = real.admit("c", [1, 1, 10])

    assert {verdict for verdict, _ in refused} == {"FULL"}
    assert [waits for _, waits in refused[:1]] == [
        [(9, 1_000_000, 0), (0, 0, 1_000_000), (90, 600_000, 0)]
    ]
    assert (verdict, [view[0] for view in views]) == ("OK", [8, 0, 80])


def test_asking_again_takes_nothing_more(client: redis.Redis) -> None:
    real = server(client, Limit("b", 60, 3), Limit("c", 0, 1))

    verdicts = [real.admit("a", [1, 1])[0] for _ in range(9)]

    assert verdicts == ["OK"] * 9
    assert real.admit("b", [1, 0])[1][0][0] == 1


def test_a_place_lasts_as_long_as_its_lease(client: redis.Redis) -> None:
    real = server(client, Limit("c", 0, 1))
    real.admit("dead", [1])
    assert real.admit("next", [1])[0] == "FULL"

    real.now_us += LEASE_MS * 1000 + 1

    assert real.admit("next", [1])[0] == "OK"
    assert client.zrange(real.limit_keys[0], 0, -1) == [b"next"]


def test_renewing_keeps_a_place_and_revives_no_released_one(client: redis.Redis) -> None:
    real = server(client, Limit("c", 0, 2))
    for id_ in ("alive", "released"):
        real.admit(id_, [1])
    real.now_us += 15_000_000
    real.release("released", [0])

    keys = [k for id_ in ("alive", "released") for k in (real.key(f"a:{id_}"), *real.limit_keys)]
    real.run(scripts.RENEW, keys, [LEASE_MS, "alive", 1, "released", 1])
    real.now_us += 15_000_000

    assert client.zrange(real.limit_keys[0], 0, -1) == [b"alive"]
    assert real.admit("new", [1])[1][0][0] == 0


def test_an_older_version_is_told_apart_and_can_be_overruled(client: redis.Redis) -> None:
    real = server(client, Limit("b", 60, 60))
    client.eval(scripts.NEWEST.text, 1, real.key("v"), 60_000, "key-1", 3, "t", 2)
    client.eval(scripts.NEWEST.text, 1, real.key("v"), 60_000, "key-1", 2)  # late: ignored

    assert real.admit("a", [1], versions=(2, 2, 1))[0] == "STALE"
    assert real.admit("a", [1], versions=(3, 1, 1))[0] == "STALE"
    assert real.admit("a", [1], versions=(3, 2, 1))[0] == "OK"
    assert real.admit("b", [1], versions=(4, 2, 0))[0] == "OK"
    assert real.admit("c", [1], versions=(1, 1, 1), mode="force")[0] == "OK"


def test_another_epoch_asks_to_be_rebuilt(client: redis.Redis) -> None:
    real = server(client, Limit("c", 0, 2))
    assert real.admit("a", [1], epoch="run-2")[0] == "REBUILD"
    keys = [real.key("epoch"), *real.limit_keys]

    real.run(scripts.REBUILD, keys, ["run-2", 60_000, LEASE_MS, 2, "running-1"])

    assert real.admit("a", [1], epoch="run-2")[1][0][0] == 0
    assert real.admit("b", [1], epoch="run-2")[0] == "FULL"
