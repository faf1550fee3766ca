"""The engine replicas that the worker is connected to, by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex_engine.client import EngineClient
from loraplex_engine.protocol import ReplicaRecord

from loraplex_platform.gateway.routing import Router


@dataclass(frozen=True, slots=True)
class ConnectedReplica:
    """A replica that answers on its connection now."""

    replica_id: str
    record: ReplicaRecord
    client: EngineClient

    @property
    def fingerprint(self) -> str:
        """What its own connection says, which is newer than what it has announced."""
        welcome = self.client.welcome
        said = "" if welcome is None else welcome.model_fingerprint
        return said or self.record.model_fingerprint


class ConnectedEngines:
    """What the router finds and keeps connected; announcements alone do not count."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def all(self) -> Sequence[ConnectedReplica]:
        """Every replica that answers. Its id is what its own connection says."""
        return [
            ConnectedReplica(replica.client.welcome.replica_id, replica.record, replica.client)
            for replica in self._router.replicas
            if replica.client.welcome is not None
        ]

    def find(self, replica_id: str) -> ConnectedReplica | None:
        """By id."""
        return next((found for found in self.all() if found.replica_id == replica_id), None)
