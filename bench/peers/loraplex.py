"""Loraplex itself: the whole product (`loraplex up`), asked through its gateway like any peer.

Tenants, keys, adapters and deployments are made once per bench, over the admin API, in a data directory of
the bench; each replay then starts the product on that directory. Speculation is off: no peer speculates here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loraplex_platform.admin_client import AdminApiError, AdminClient

from bench import load
from bench.peers.base import START_TIMEOUT_S, Place, Server, Tell, UnavailableError
from bench.processes import Served
from bench.suite import Workload
from bench.workload import DEFAULT_TENANT

_UPLOADS_AT_ONCE = 4  # as many as the control API takes at once


class Loraplex(Server):
    """One setting of the engine.

    Args:
        engine: flags of the engine besides the defaults, as LORAPLEX_ENGINE_<FLAG> names them.
        only: workloads it is measured at; None: all.
    """

    def __init__(
        self,
        name: str = "loraplex",
        title: str = "Loraplex",
        engine: Mapping[str, str] | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._only = only
        self.name = name
        self.title = title
        self._engine = dict(engine or {})
        self.weights = self._engine.get("quantization", "")
        self._keys: dict[str, str] = {}

    def prepare(self, place: Place, workloads: Sequence[Workload], tell: Tell) -> None:
        """See `Contender`. The data directory is shared by all settings of one bench."""
        self._check_settings()
        models = {pair for workload in workloads for pair in workload.models}
        tenants = {item.tenant for workload in workloads for item in workload.items}
        tell("starting")
        with self._up(place, "prepare") as (_, state), _admin(place, state) as admin:
            ids = _tenants(admin, sorted(tenants | {DEFAULT_TENANT}))
            for slug, tenant_id in ids.items():
                names = sorted(name for tenant, name in models if tenant == slug)
                _deploy(admin, tenant_id, names, lambda name: place.adapters_dir / name, tell)
                self._keys[slug] = str(admin.create_key(tenant_id, "bench")["secret"])

    def register(
        self,
        place: Place,
        names: Sequence[str],
        folder: Path,
        tell: Tell,
        make: Callable[[str], Path] | None = None,
    ) -> None:
        """Upload and deploy more adapters for the default tenant, from `folder`.

        Args:
            make: writes the folder of a name, which is removed after its upload.
        """
        with self._up(place, "register") as (_, state), _admin(place, state) as admin:
            (tenant_id,) = _tenants(admin, [DEFAULT_TENANT]).values()
            find = make or (lambda name: folder / name)
            _deploy(admin, tenant_id, names, find, tell, is_temporary=make is not None)

    def is_for(self, workload: Workload) -> bool:
        """See `Contender`."""
        return self._only is None or workload.name in self._only

    def _check_settings(self) -> None:
        from loraplex_engine.config import EngineConfig

        known = set(EngineConfig.__dataclass_fields__)
        for flag in self._engine:
            if flag.lower() not in known:
                raise UnavailableError(f"this version's engine has no --{flag.replace('_', '-')}")

    @contextlib.contextmanager
    def _up(self, place: Place, purpose: str) -> Iterator[tuple[Served, dict[str, Any]]]:
        data_dir = place.scratch / "data"
        data_dir.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [sys.executable, "-m", "loraplex_platform.cli", "up"]
        command += ["--no-console", "--data-dir", data_dir, "--model", place.model_dir]
        command += ["--gateway-port", "0", "--control-port", "0"]
        command += ["--num-threads", str(place.num_threads)]
        env = {f"LORAPLEX_ENGINE_{flag.upper()}": value for flag, value in self._engine.items()}
        env.setdefault("LORAPLEX_ENGINE_SPECULATIVE", "off")
        env.setdefault("LORAPLEX_ENGINE_DTYPE", place.dtype)
        log = place.scratch / f"{self.name}-{purpose}.log"
        with Served(command, log, env) as served:
            state_file = data_dir / "state.json"

            def is_up() -> bool:
                if not state_file.exists():
                    return False
                content = json.loads(state_file.read_text())
                return bool(content["pid"] == served.process.pid)

            served.wait_until(is_up, START_TIMEOUT_S)
            yield served, json.loads(state_file.read_text())

    @contextlib.contextmanager
    def serve(self, place: Place, workload: Workload) -> Iterator[tuple[Served, load.Target]]:
        """See `Server`."""
        with self._up(place, workload.name) as (served, state):
            yield served, load.Target(state["gateway_url"], self._keys)


def _admin(place: Place, state: Mapping[str, Any]) -> AdminClient:
    secrets = json.loads((place.scratch / "data" / "secrets.json").read_text())
    return AdminClient(state["control_url"], secrets["admin_key"])


def _tenants(admin: AdminClient, slugs: Sequence[str]) -> dict[str, str]:
    """Id by slug; those that are missing are made."""
    return {
        slug: str((admin.find_tenant(slug) or admin.create_tenant(slug, slug))["id"])
        for slug in slugs
    }


def _deploy(
    admin: AdminClient,
    tenant_id: str,
    names: Sequence[str],
    find: Callable[[str], Path],
    tell: Tell,
    *,
    is_temporary: bool = False,
) -> None:
    """Upload and deploy what the tenant lacks; `find` gives an adapter's folder."""
    deployed = {str(item["name"]) for item in admin.deployments(tenant_id)}
    missing = [name for name in names if name not in deployed]

    def upload(name: str) -> None:
        folder = find(name)
        try:
            uploaded = admin.upload_adapter(tenant_id, name, folder, is_probed=False)
            admin.deploy(tenant_id, name, uploaded["version"]["id"])
        except AdminApiError as error:
            raise UnavailableError(f"adapter {name} was refused: {error}") from error
        if is_temporary:
            shutil.rmtree(folder)

    with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as pool:
        for number, _ in enumerate(pool.map(upload, missing)):
            tell(f"{number + 1} of {len(missing)} adapters uploaded")
