"""demo.json: how to reach a running demo, for `loraplex demo`, `loraplex verify` and scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loraplex_platform.local.data_dir import DataDir, read_json
from loraplex_platform.local.errors import LocalModeError


@dataclass(frozen=True, slots=True)
class Target:
    """One model as one tenant sees it."""

    tenant: str  # slug
    tenant_id: str
    model: str
    api_key: str = field(repr=False)

    @property
    def label(self) -> str:
        """`tenant/model`."""
        return f"{self.tenant}/{self.model}"


@dataclass(frozen=True, slots=True)
class RunningDemo:
    """A running `loraplex up --demo`."""

    gateway_url: str
    control_url: str
    admin_key: str = field(repr=False)
    base_model: str
    targets: tuple[Target, ...]  # every deployment, then the base once per tenant


def find_running_demo(data_dir: Path) -> RunningDemo:
    """What the demo on this data directory has written.

    Raises:
        LocalModeError: none runs there.
    """
    folder = DataDir(data_dir.expanduser().resolve())
    demo = read_json(folder.demo_file)
    state = read_state(folder)
    if demo is None or state is None:
        raise LocalModeError(
            f"no demo runs on {data_dir}: start one with `make up` (or `loraplex up --demo`) in another "
            "terminal, or name its --data-dir"
        )
    base = str(state["base_model"])
    targets = [
        Target(tenant["slug"], tenant["id"], model, tenant["api_key"])
        for tenant in demo["tenants"]
        for model in tenant["models"]
    ]
    return RunningDemo(
        gateway_url=demo["gateway_url"],
        control_url=demo["control_url"],
        admin_key=demo["admin_key"],
        base_model=base,
        targets=tuple(sorted(targets, key=lambda target: target.model == base)),
    )


def read_state(folder: DataDir) -> dict[str, Any] | None:
    """state.json of a fleet that runs; None if none does (a killed one leaves the file)."""
    import psutil

    state = read_json(folder.state_file)
    return state if state is not None and psutil.pid_exists(state["pid"]) else None
