"""Engines as the worker sees them, without a registry: whatever a test connects by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import ReplicaRecord
from loraplex_platform.gateway.routing import Replica
from loraplex_platform.worker.engines import ConnectedEngines

from tests.support.fake_engine import FakeEngine


def replica_record(engine: FakeEngine) -> ReplicaRecord:
    """What the fake would announce."""
    return ReplicaRecord(
        replica_id=engine.replica_id,
        incarnation=engine.incarnation,
        address=engine.address,
        curve_public_key=None,
        base_model="smollm2-135m",
        model_fingerprint=engine.model_fingerprint,
        kv_format="test",
        device="cpu",
        isa="test",
        dtype="float32",
        torch_version="0",
        backends={},
        max_model_len=engine.max_model_len,
        max_loras=8,
        max_lora_rank=64,
        state="ready",
        started_at_unix_s=0.0,
        row_rule_holds=True,
    )


class FixedRouter:
    """Stands in for the gateway's router: the replicas it was given."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas


@asynccontextmanager
async def connected(*engines: FakeEngine) -> AsyncIterator[ConnectedEngines]:
    """The worker's view of these fakes, each connected."""
    replicas = []
    try:
        for engine in engines:
            client = EngineClient(engine.address, gateway_id="worker-test")
            await client.__aenter__()
            replicas.append(Replica(replica_record(engine), client))
            await client.connect()
        yield ConnectedEngines(FixedRouter(replicas))  # type: ignore[arg-type] # what it uses of one
    finally:
        for replica in replicas:
            await replica.client.close()
