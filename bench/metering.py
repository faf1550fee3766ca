"""What metering costs: `python -m bench.metering`.

A real gateway, a durable Postgres (fsync and synchronous_commit on) and a Redis of their own, and an
engine that answers at once, all on this machine: every request is checked, admitted, reserved with two
quotas, dispatched, settled and answered. First as many as it takes (the saturating rate), then at half
that rate, arriving at random: CPU per request of each process, and the time until the whole answer.
Once with all requests on one tenant, whose windows every one of them locks, and once over many tenants.
`--database-only` leaves out the gateway: reserve and settle alone, to see what the rows give.

What is *added*: at half the rate slices of the run go in pairs, the same arrivals once through the gateway and
once from this client straight to the engine; of each pair the percentiles are subtracted, and the median pair is
told. Of what is left to the stand, the table says how much: the CPU of the engine and of this client, which share
the cores, and how late the client sent what was due (in both of a pair, and in the times told).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import msgspec
import psutil
import redis as redis_client
import uvloop
from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import REPLICA_KEY_PREFIX, Generate, ReplicaRecord, SamplingParams
from loraplex_platform.db import ApiKey, ApiKeySecret, Tenant, migrate
from loraplex_platform.db.session import Database, open_database
from loraplex_platform.ids import uuid7
from loraplex_platform.local.embedded import start_postgres, start_redis
from loraplex_platform.local.server_process import EmbeddedServer
from loraplex_platform.metering import service as metering
from loraplex_platform.metering.policy import AttemptUsage
from loraplex_platform.metering.records import Reservation, Settlement
from loraplex_platform.settings import DatabaseSettings, MigrationSettings
from loraplex_platform.tenancy import keys
from loraplex_platform.variables import with_login
from pydantic import SecretStr

from bench.processes import free_port
from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, add_base, deploy
from tests.support.limits import set_limit
from tests.support.metering import Customer

MANY_TENANTS = 1000
SIDE_BY_SIDE = 32
PAIRS = 3  # of slices with and without a gateway
_IDLE_S = 2.0  # then a connection is not used again: the gateway closes one that is idle for 5 s
_PEPPER = SecretStr("pepper-for-benchmarks-0123456789abcdef")
_SERVE_ROLE = "loraplex_serve"
_STAND = ("engine", "client")  # whose CPU is not the platform's
_PROMPT, _MAX_TOKENS = "the capital of France is", 8
_RUN_GATEWAY = """
import sys
from pathlib import Path
from loraplex_platform.gateway.main import run
from loraplex_platform.settings import GatewaySettings
sys.exit(run(GatewaySettings(), port_file=Path(sys.argv[1])))
"""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run. CPU in milliseconds per request, times in milliseconds.

    Attributes:
        late_p99_ms: how late what was due was sent, by this client.
    """

    rate_per_s: float
    cpu_ms: dict[str, float]
    p50_ms: float
    p99_ms: float
    late_p99_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Added:
    """What a gateway adds at half the saturating rate; each the median of the pairs, in milliseconds."""

    with_gateway: Result
    without: Result
    p50_ms: float
    p99_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.metering", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--tenants", type=int, default=MANY_TENANTS, help="when there are many")
    parser.add_argument("--limits", type=int, default=2, help="quotas of each tenant, 0 to 2")
    parser.add_argument("--database-only", action="store_true", help="without a gateway")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="lpm-", ignore_cleanup_errors=True)
        )
        folder = Path(name)
        postgres = start_postgres(folder / "pg", is_durable=True)
        stack.callback(postgres.stop)
        redis = start_redis(folder / "rd")
        stack.callback(redis.stop)
        _prepare(postgres.url)
        # A collection of all that is imported here would be a pause in somebody's answer.
        gc.collect()
        gc.freeze()
        gc.disable()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(_Servers(folder, postgres, redis), options))
    return 0


@dataclass(frozen=True, slots=True)
class _Servers:
    folder: Path
    postgres: EmbeddedServer
    redis: EmbeddedServer

    @property
    def database_url(self) -> str:
        """As serving processes use it."""
        return with_login(self.postgres.url, _SERVE_ROLE)


def _prepare(url: str) -> None:
    values = {"database_url": url, "serve_role": _SERVE_ROLE}
    migrate.upgrade(DatabaseSettings.model_validate({"database_url": url}))
    migrate.ensure_serving_role(MigrationSettings.model_validate(values))


async def _measure(servers: _Servers, options: argparse.Namespace) -> None:
    settings = DatabaseSettings.model_validate({"database_url": servers.database_url})
    async with open_database(settings) as db:
        base_id = await add_base(db)
        await deploy(db, base_id, None, BASE)
        for count in (1, options.tenants):
            customers = [await _add_tenant(db, options.limits) for _ in range(count)]
            label = "one hot tenant" if count == 1 else f"{count} tenants"
            if options.database_only:
                _show(label, "saturated", await _database(servers, db, customers, options), options)
                continue
            async with _gateway(servers) as (port, processes, engine):
                payloads = [_payload(port, customer) for customer in customers]
                load = _Load(port, payloads, processes)
                await load.each_once()
                await load.closed(min(3.0, options.seconds))
                full = await load.closed(options.seconds)
                _show(label, "saturated", full, options)
                added = await _added(load, engine, full.rate_per_s / 2, options.seconds)
                _show(label, "half of it", added.with_gateway, options)
                _show_added(label, added, options)


async def _added(load: _Load, engine: EngineClient, rate_per_s: float, seconds: float) -> Added:
    """Slices in pairs, each with the same arrivals; all together `seconds` long through the gateway."""
    alone = _EngineAlone(engine)
    pairs = []
    for _ in range(PAIRS):
        due_s = _arrivals(rate_per_s, seconds / PAIRS)
        pairs.append((await load.open(due_s), await load.open(due_s, alone.ask)))
    return Added(
        with_gateway=_median_of([pair[0] for pair in pairs]),
        without=_median_of([pair[1] for pair in pairs]),
        p50_ms=statistics.median(one.p50_ms - other.p50_ms for one, other in pairs),
        p99_ms=statistics.median(one.p99_ms - other.p99_ms for one, other in pairs),
    )


def _arrivals(rate_per_s: float, seconds: float) -> list[float]:
    """At random (Poisson), in seconds from the beginning."""
    gaps_s = (random.expovariate(rate_per_s) for _ in itertools.count())
    return list(itertools.takewhile(lambda at_s: at_s < seconds, itertools.accumulate(gaps_s)))


def _median_of(results: Sequence[Result]) -> Result:
    def of(number: Callable[[Result], float]) -> float:
        return statistics.median(number(result) for result in results)

    return Result(
        rate_per_s=of(lambda x: x.rate_per_s),
        cpu_ms={name: of(lambda x, name=name: x.cpu_ms[name]) for name in results[0].cpu_ms},  # type: ignore[misc] # a default binds it
        p50_ms=of(lambda x: x.p50_ms),
        p99_ms=of(lambda x: x.p99_ms),
        late_p99_ms=of(lambda x: x.late_p99_ms),
    )


def _show(label: str, how: str, result: Result, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"tenants": label, "load": how} | _fields(result)), flush=True)
        return
    ours = {name: ms for name, ms in result.cpu_ms.items() if name not in _STAND}
    all_ms = sum(ours.values())
    cpu = ", ".join(f"{name} {ms:.2f} ({ms / all_ms:.0%})" for name, ms in ours.items())
    stand = ", ".join(
        f"{name} {result.cpu_ms[name]:.2f}" for name in _STAND if name in result.cpu_ms
    )
    cpu += f"; of the stand: {stand}" if stand else ""
    print(
        f"{label:>15}, {how:<11}{result.rate_per_s:7.0f}/s   CPU ms a request: {cpu}"
        f"   answered in p50 {result.p50_ms:.1f} ms, p99 {result.p99_ms:.1f} ms",
        flush=True,
    )


def _show_added(label: str, added: Added, options: argparse.Namespace) -> None:
    without, late_ms = added.without, added.with_gateway.late_p99_ms
    if options.json:
        record = {"tenants": label, "load": "engine alone"} | _fields(without)
        added_ms = {"added_p50_ms": round(added.p50_ms, 2), "added_p99_ms": round(added.p99_ms, 2)}
        print(json.dumps(record | added_ms), flush=True)
        return
    print(
        f"{label:>15}, added by the gateway: p50 {added.p50_ms:.1f} ms, p99 {added.p99_ms:.1f} ms"
        f"   (the engine alone: p50 {without.p50_ms:.1f} ms, p99 {without.p99_ms:.1f} ms; the client sent"
        f" p99 {late_ms:.1f} ms late, {without.late_p99_ms:.1f} ms without a gateway)",
        flush=True,
    )


def _fields(result: Result) -> dict[str, object]:
    return {
        "rate_per_s": round(result.rate_per_s, 1),
        "cpu_ms": {name: round(ms, 3) for name, ms in result.cpu_ms.items()},
        "p50_ms": round(result.p50_ms, 2),
        "p99_ms": round(result.p99_ms, 2),
        "late_p99_ms": round(result.late_p99_ms, 2),
    }


async def _add_tenant(db: Database, num_limits: int) -> Customer:
    minted = keys.mint()
    tenant_id, key_id = uuid7(), uuid7()
    async with db.transaction() as session:
        session.add(Tenant(id=tenant_id, slug=f"t{tenant_id.hex[-20:]}", name="bench"))
        await session.flush()
        session.add(
            ApiKey(
                id=key_id,
                tenant_id=tenant_id,
                name="bench",
                public_id=minted.public_id,
                last4=minted.last4,
            )
        )
        await session.flush()
        mac = keys.mac(_PEPPER, minted.secret)
        session.add(ApiKeySecret(id=uuid7(), key_id=key_id, mac=mac))
    customer = Customer(tenant_id, key_id, minted.secret)
    quotas = (("cost", "1000000", "month"), ("tokens_total", "1000000000000", "day"))
    for metric, value, period in quotas[:num_limits]:
        await set_limit(db, customer, metric, value, period, alert_pct=[80])
    return customer


# ---------------------------------------------------------------------------- the database alone


async def _database(
    servers: _Servers, db: Database, customers: Sequence[Customer], options: argparse.Namespace
) -> Result:
    waits_s: list[float] = []
    processes = {"postgres": _tree(servers.postgres.pid), "client": [psutil.Process()]}
    end_s = time.monotonic() + options.seconds

    async def one_after_another() -> None:
        while time.monotonic() < end_s:
            customer = random.choice(customers)
            began_s = time.perf_counter()
            request_id = await _reserve(db, customer)
            await metering.settle(db.sessions, _settlement(request_id))
            waits_s.append(time.perf_counter() - began_s)

    customer = customers[0]
    await asyncio.gather(*(_reserve(db, customer) for _ in range(16)))  # connections, plans
    before, began_s = _cpu_s(processes), time.monotonic()
    await asyncio.gather(*(one_after_another() for _ in range(16)))
    return _result(waits_s, before, _cpu_s(processes), time.monotonic() - began_s)


async def _reserve(db: Database, customer: Customer) -> UUID:
    request_id = uuid7()
    await metering.reserve(
        db.sessions,
        Reservation(
            request_id=request_id,
            tenant_id=customer.tenant_id,
            key_id=customer.key_id,
            endpoint="completions",
            model=BASE,
            owner="bench",
            est_prompt_tokens=100,
            est_completion_tokens=100,
            replica_id="fake-0",
        ),
    )
    return request_id


def _settlement(request_id: UUID) -> Settlement:
    return Settlement(
        request_id=request_id,
        lease_token=1,
        usage=AttemptUsage(outcome="completed", source="terminal", prompt_tokens=100, generated=50),
        settled_by="bench",
        finish_reason="stop",
        http_status=200,
    )


# ---------------------------------------------------------------------------- through a gateway


@asynccontextmanager
async def _gateway(
    servers: _Servers,
) -> AsyncIterator[tuple[int, dict[str, list[psutil.Process]], EngineClient]]:
    """A gateway and an engine as processes; the gateway's port, whose CPU counts, and a way to the engine."""
    folder = Path(tempfile.mkdtemp(dir=servers.folder))
    address = f"ipc://{folder / 'e.sock'}"
    port_file = folder / "port"
    environment = os.environ | {
        "LORAPLEX_DATABASE_URL": servers.database_url,
        "LORAPLEX_REDIS_URL": servers.redis.url,
        "LORAPLEX_MODEL_DIR": str(tiny_model.write(folder / "model")),
        "LORAPLEX_BASE_MODEL": BASE,
        "LORAPLEX_KEY_PEPPER": _PEPPER.get_secret_value(),
        "LORAPLEX_SALT_KEY": "salt-for-benchmarks-0123456789abcdef",
        "LORAPLEX_GATEWAY_PORT": str(free_port()),
    }
    engine = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.fake_engine", "--address", address),
        stdout=asyncio.subprocess.DEVNULL,
    )
    with _log_of(folder).open("wb") as log:
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _RUN_GATEWAY, str(port_file), env=environment, stderr=log
        )
    try:
        _announce(servers.redis.url, address)
        port = await _until_ready(port_file, gateway)
        async with EngineClient(address, gateway_id="bench") as straight:
            await straight.connect()
            yield (
                port,
                {
                    "gateway": [psutil.Process(gateway.pid)],
                    "postgres": _tree(servers.postgres.pid),
                    "redis": _tree(servers.redis.pid),
                    "engine": [psutil.Process(engine.pid)],
                    "client": [psutil.Process()],
                },
                straight,
            )
    finally:
        for process in (gateway, engine):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in (gateway, engine):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


def _log_of(folder: Path) -> Path:
    return folder / "log"


def _announce(redis_url: str, address: str) -> None:
    record = ReplicaRecord(
        replica_id="fake-0",
        incarnation="bench",
        address=address,
        curve_public_key=None,
        base_model=BASE,
        model_fingerprint="sha256:" + "f" * 64,
        kv_format="fake",
        device="cpu",
        isa="none",
        dtype="float32",
        torch_version="none",
        backends={},
        max_model_len=tiny_model.CONTEXT_LENGTH,
        max_loras=4,
        max_lora_rank=64,
        state="ready",
        started_at_unix_s=time.time(),
        row_rule_holds=True,
    )
    connection = redis_client.Redis.from_url(redis_url)
    connection.set(REPLICA_KEY_PREFIX + record.replica_id, msgspec.json.encode(record))
    connection.close()


def _read_port(port_file: Path) -> int | None:
    return int(port_file.read_text()) if port_file.exists() else None


async def _until_ready(port_file: Path, gateway: asyncio.subprocess.Process) -> int:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s and gateway.returncode is None:
        port = _read_port(port_file)
        if port is not None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                status, body = await _Connection(port).ask(
                    b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"
                )
                if status == 200 and json.loads(body)["engines_ready"] == 1:
                    return port
        await asyncio.sleep(0.1)
    text = _log_of(port_file.parent).read_text()
    raise RuntimeError(f"the gateway did not come up: {text[-2000:]}")


def _payload(port: int, customer: Customer) -> bytes:
    body = json.dumps({"model": BASE, "prompt": _PROMPT, "max_tokens": _MAX_TOKENS}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"authorization: Bearer {customer.secret}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection:
    """One kept connection; as little work as it takes, for its CPU is on the same machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used_s = 0.0

    async def ask(self, payload: bytes) -> tuple[int, bytes]:
        """Status and body."""
        if self._streams is not None and time.monotonic() - self._used_s > _IDLE_S:
            self._streams[1].close()
            self._streams = None
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(payload)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        start = lower.index(b"content-length:") + len(b"content-length:")
        length = int(lower[start : lower.index(b"\r\n", start)])
        body = await reader.readexactly(length)
        self._used_s = time.monotonic()
        return int(head[9:12]), body


class _EngineAlone:
    """The same requests without a gateway: what is asked of the engine, and its answer to the end."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def ask(self) -> None:
        """One request."""
        sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=1.0)
        stream = await self._engine.generate(
            Generate(
                request_id=str(uuid7()),
                attempt=1,
                lease_token=1,
                tenant_id="bench",
                tenant_salt=b"bench",
                prompt_token_ids=[1] * len(_PROMPT.split()),
                sampling=sampling,
            )
        )
        await stream.follow(lambda event: None)


class _Load:
    """Requests to one gateway."""

    def __init__(
        self, port: int, payloads: Sequence[bytes], processes: dict[str, list[psutil.Process]]
    ) -> None:
        self._port = port
        self._payloads = payloads
        self._processes = processes
        self._idle: list[_Connection] = []

    async def each_once(self) -> None:
        """What a tenant's first request costs once a day (its places, put into Redis) counts nowhere."""
        payloads = iter(self._payloads)

        async def one_after_another() -> None:
            for payload in payloads:
                await self._ask(time.perf_counter(), payload)

        await asyncio.gather(*(one_after_another() for _ in range(SIDE_BY_SIDE)))

    async def closed(self, seconds: float) -> Result:
        """A fixed number of clients, each asking again as soon as it is answered."""
        waits_s: list[float] = []
        before, began_s = _cpu_s(self._processes), time.monotonic()

        async def one_after_another() -> None:
            while time.monotonic() < began_s + seconds:
                waits_s.append(await self._ask(time.perf_counter()))

        await asyncio.gather(*(one_after_another() for _ in range(SIDE_BY_SIDE)))
        return _result(waits_s, before, _cpu_s(self._processes), time.monotonic() - began_s)

    async def open(
        self, due_s: Sequence[float], ask: Callable[[], Awaitable[object]] | None = None
    ) -> Result:
        """Requests that arrive when they are due, whatever the answers: waiting in line counts.

        Args:
            due_s: seconds from now.
            ask: how one is asked, if not through the gateway.
        """
        waits_s: list[float] = []
        late_s: list[float] = []
        ask = ask or self._ask_once

        async def one(at_s: float) -> None:
            late_s.append(time.perf_counter() - at_s)
            await ask()
            waits_s.append(time.perf_counter() - at_s)

        before, began_s = _cpu_s(self._processes), time.perf_counter()
        asking = []
        for at_s in due_s:
            delay_s = began_s + at_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            asking.append(asyncio.create_task(one(began_s + at_s)))
        await asyncio.gather(*asking)
        elapsed_s = time.perf_counter() - began_s
        return _result(waits_s, before, _cpu_s(self._processes), elapsed_s, late_s)

    async def _ask_once(self) -> None:
        await self._ask(0.0)

    async def _ask(self, since_s: float, payload: bytes | None = None) -> float:
        connection = self._idle.pop() if self._idle else _Connection(self._port)
        status, body = await connection.ask(payload or random.choice(self._payloads))
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {body.decode()[:300]}")
        self._idle.append(connection)
        return time.perf_counter() - since_s


def _tree(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)]


def _cpu_s(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Of each with its children, also those that have ended; of this client without: they are the others."""
    found = {}
    for name, roots in processes.items():
        seconds = 0.0
        for root in roots:
            if root.pid == os.getpid():
                seconds += sum(root.cpu_times()[:2])
                continue
            seconds += sum(root.cpu_times()[:4])
            for child in root.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    seconds += sum(child.cpu_times()[:2])
        found[name] = seconds
    return found


def _result(
    waits_s: list[float],
    before: dict[str, float],
    after: dict[str, float],
    elapsed_s: float,
    late_s: Sequence[float] = (0.0,),
) -> Result:
    waits_s.sort()
    done = len(waits_s)
    return Result(
        rate_per_s=done / elapsed_s,
        cpu_ms={name: 1e3 * (after[name] - before[name]) / done for name in after},
        p50_ms=1e3 * waits_s[done // 2],
        p99_ms=1e3 * waits_s[done * 99 // 100],
        late_p99_ms=1e3 * sorted(late_s)[len(late_s) * 99 // 100],
    )


if __name__ == "__main__":
    sys.exit(main())
