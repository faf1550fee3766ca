"""A model folder small enough that an engine starts on it at once, with adapters that fit it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from loraplex_engine.artifact import ModelShape
from loraplex_platform.admin_client import AdminClient

from tests.platform.gateway import tiny_model as gateway_model
from tests.support.adapter_files import make_adapter
from tests.support.tiny_model import TinyShape, write_tiny_model

BASE = "tiny"
CONTEXT_LENGTH = 4096
ADAPTERS = {"acme": ("one", "two"), "globex": ("three",)}


@dataclass(frozen=True, slots=True)
class Customer:
    """A tenant with its key and models."""

    slug: str
    id: str
    api_key: str
    models: tuple[str, ...]  # its deployments, then the base


def write_model(folder: Path) -> Path:
    """Random weights under a real (byte-level) tokenizer and chat template; named `tiny`."""
    model = folder / BASE
    vocab_size = gateway_model.texts().config["vocab_size"]
    write_tiny_model(model, TinyShape(vocab_size=vocab_size, max_position=CONTEXT_LENGTH))
    weights_config = json.loads((model / "config.json").read_text())
    gateway_model.write(model)
    (model / "config.json").write_text(json.dumps(weights_config))
    return model


def write_adapters(folder: Path, model: Path) -> dict[str, Path]:
    """One folder per adapter, of different ranks and target modules."""
    shape = ModelShape.from_config_json(model / "config.json")
    targets = (("q_proj", "v_proj"), ("q_proj", "o_proj", "down_proj"), ("gate_proj", "up_proj"))
    names = [name for names in ADAPTERS.values() for name in names]
    for number, name in enumerate(names):
        make_adapter(
            folder / name,
            shape,
            rank=(4, 8, 16)[number],
            linears=targets[number],
            seed=number,
            size=0.3,
        )
    return {name: folder / name for name in names}


def seed(admin: AdminClient, adapters: dict[str, Path]) -> list[Customer]:
    """Two tenants with keys and deployments, through the control API."""
    customers = []
    for slug, names in ADAPTERS.items():
        tenant = admin.create_tenant(slug, slug.title())
        for name in names:
            adapter = admin.upload_adapter(tenant["id"], name, adapters[name])
            admin.deploy(tenant["id"], name, adapter["version"]["id"])
        key = admin.create_key(tenant["id"], "tests")["secret"]
        customers.append(Customer(slug, tenant["id"], key, (*names, BASE)))
    return customers
