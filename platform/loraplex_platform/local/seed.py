"""The demo's data, made through the control API as any operator would: two tenants, three adapters.

Idempotent: what is there is kept. The database holds only hashes of keys and passwords, so their clear
text is kept in demo-seed.json (0600) of the data directory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loraplex_engine.artifact import AdapterLimits, read_adapter

from loraplex_platform.admin_client import AdminClient
from loraplex_platform.local.data_dir import DataDir, read_json, write_private
from loraplex_platform.local.errors import SettingError

ADMIN_EMAIL: Final = "admin@localhost.localdomain"
KEY_NAME: Final = "demo"
DEMO_TENANTS: Final = (
    ("acme", "Acme", ("capitals", "pirate")),
    ("globex", "Globex", ("json-answers",)),
)


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """One tenant of the demo."""

    id: str
    slug: str
    api_key: str = field(repr=False)
    models: tuple[str, ...]  # its deployments, then the base


@dataclass(frozen=True, slots=True)
class Demo:
    """What there is to use."""

    tenants: tuple[DemoTenant, ...]
    email: str
    password: str = field(repr=False)
    is_password_new: bool


def adapters_folder() -> Path:
    """Where the trained example adapters are: beside the source, or inside an installed wheel.

    Raises:
        SettingError: nowhere.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_examples", package.parents[1] / "examples" / "adapters"):
        if (folder / "capitals" / "adapter_config.json").is_file():
            return folder
    raise SettingError(
        "the example adapters (examples/adapters) are not in this installation: "
        "start without --demo, or from a clone of the repository"
    )


def seed_demo(
    admin: AdminClient, data_dir: DataDir, base_model: str, tell: Callable[[str], None]
) -> Demo:
    """Make what is missing of the demo's data; `tell` hears of each thing that takes a moment.

    Raises:
        AdminApiError: the control API refused something.
        SettingError: the example adapters are not there.
    """
    folder = adapters_folder()
    state = read_json(data_dir.seed_file) or {}
    keys: dict[str, str] = state.setdefault("keys", {})
    tenants = []
    for slug, name, model_names in DEMO_TENANTS:
        tenant = admin.find_tenant(slug) or admin.create_tenant(slug, name)
        tenant_id = tenant["id"]
        if not _is_live(admin, tenant_id, keys.get(slug)):
            keys[slug] = admin.create_key(tenant_id, KEY_NAME)["secret"]
            write_private(data_dir.seed_file, state)
        _deploy_missing(admin, tenant_id, folder, model_names, tell)
        tenants.append(DemoTenant(tenant_id, slug, keys[slug], (*model_names, base_model)))
    is_new = _ensure_user(admin, data_dir, state)
    return Demo(tuple(tenants), state["email"], state["password"], is_new)


def _is_live(admin: AdminClient, tenant_id: str, secret: str | None) -> bool:
    """Whether this secret belongs to an active key: it may have been revoked in the console."""
    if secret is None:
        return False
    return any(
        key["status"] == "active" and f"_{key['public_id']}_" in secret
        for key in admin.keys(tenant_id)
    )


def _deploy_missing(
    admin: AdminClient,
    tenant_id: str,
    folder: Path,
    model_names: tuple[str, ...],
    tell: Callable[[str], None],
) -> None:
    deployed = {item["name"] for item in admin.deployments(tenant_id)}
    adapters = {item["name"]: item for item in admin.adapters(tenant_id)}
    for name in model_names:
        # A deployment that is there stays as it is: the operator may have pointed it elsewhere.
        if name in deployed:
            continue
        version_id = _version_with_digest(adapters.get(name), folder / name)
        if version_id is None:
            tell(f"uploading and checking adapter {name}")
            version_id = admin.upload_adapter(tenant_id, name, folder / name)["version"]["id"]
        admin.deploy(tenant_id, name, version_id)


def _version_with_digest(adapter: dict[str, Any] | None, folder: Path) -> str | None:
    if adapter is None:
        return None
    digest = read_adapter(folder, limits=AdapterLimits()).digest
    for version in adapter["versions"]:
        if version["digest"] == digest and version["status"] == "ready":
            return str(version["id"])
    return None


def _ensure_user(admin: AdminClient, data_dir: DataDir, state: dict[str, Any]) -> bool:
    """Make the console's user unless we know its password already; True if it was made now."""
    if "password" in state and admin.find_user(state["email"]) is not None:
        return False
    state["email"] = ADMIN_EMAIL
    if admin.find_user(ADMIN_EMAIL) is not None:
        # Its password is lost with an old demo-seed.json, and passwords are never read back.
        user, _, domain = ADMIN_EMAIL.partition("@")
        state["email"] = f"{user}-{secrets.token_hex(3)}@{domain}"
    state["password"] = secrets.token_urlsafe(12)
    admin.create_user(state["email"], state["password"], "admin")
    write_private(data_dir.seed_file, state)
    return True
