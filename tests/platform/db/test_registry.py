"""The schema itself keeps a tenant's deployments, revisions and adapters together."""

from __future__ import annotations

import psycopg
import pytest
from loraplex_platform.db.session import Database
from loraplex_platform.gateway.queries import find_model, list_models
from psycopg import errors

from tests.platform.gateway.stand import BASE, add_base, deploy
from tests.support.metering import add_customer

OURS, OTHERS = "sha256:" + "a" * 64, "sha256:" + "b" * 64
REVISION = """
insert into deployment_revisions
    (id, deployment_id, tenant_id, number, base_model_id, adapter_version_id, adapter_digest, params, sha256)
select gen_random_uuid(), d.id, {tenant}, 2, d.base_model_id, {version}, {digest}, '{{}}', ''
from deployments d where d.public_name = '{name}'
"""
ACME = "(select id from tenants where slug = 'acme')"
GLOBEX = "(select id from tenants where slug = 'globex')"
VERSION = "(select id from adapter_versions where digest = '{}')"


async def _two_tenants(db: Database) -> None:
    base_id = await add_base(db)
    acme, globex = await add_customer(db, "acme"), await add_customer(db, "globex")
    await deploy(db, base_id, None, BASE)
    await deploy(db, base_id, acme.tenant_id, "ours", digest=OURS)
    await deploy(db, base_id, globex.tenant_id, "others", digest=OTHERS)


def _revision(name: str, tenant: str, version: str = "null", digest: str = "null") -> str:
    return REVISION.format(name=name, tenant=tenant, version=version, digest=digest)


@pytest.mark.parametrize(
    "statement",
    [
        # A revision of another tenant's deployment, or of the platform's.
        _revision("others", ACME),
        _revision(BASE, ACME),
        # Another tenant's adapter, with either tenant's name on the revision, or with none.
        _revision("ours", ACME, VERSION.format(OTHERS), f"'{OTHERS}'"),
        _revision("ours", GLOBEX, VERSION.format(OTHERS), f"'{OTHERS}'"),
        _revision("ours", "null", VERSION.format(OTHERS), f"'{OTHERS}'"),
        _revision(BASE, "null", VERSION.format(OURS), f"'{OURS}'"),
        # A digest that is not the version's, or of no version.
        _revision("ours", ACME, VERSION.format(OURS), f"'{OTHERS}'"),
        _revision("ours", ACME, VERSION.format(OURS)),
        _revision("ours", ACME, digest=f"'{OTHERS}'"),
        # A deployment that answers with another one's revision.
        "update deployments set current_revision_id = (select current_revision_id from deployments"
        " where public_name = 'others') where public_name = 'ours'",
    ],
)
async def test_what_crosses_tenants_cannot_be_written(
    db: Database, db_url: str, statement: str
) -> None:
    await _two_tenants(db)

    with (
        psycopg.connect(db_url) as owner,
        pytest.raises((errors.ForeignKeyViolation, errors.CheckViolation)),
    ):
        owner.execute(statement)


async def test_a_tenants_own_may_be_written(db: Database, db_url: str) -> None:
    await _two_tenants(db)

    with psycopg.connect(db_url) as owner:
        own = _revision("ours", ACME, VERSION.format(OURS), f"'{OURS}'")
        assert owner.execute(own).rowcount == 1


async def test_a_revision_without_its_deployments_tenant_is_never_served(
    db: Database, db_url: str
) -> None:
    await _two_tenants(db)
    with psycopg.connect(db_url) as owner:
        owner.execute(_revision("ours", "null"))
        owner.execute(
            "update deployments d set current_revision_id = r.id from deployment_revisions r"
            " where r.deployment_id = d.id and r.number = 2"
        )
        row = owner.execute("select id from tenants where slug = 'acme'").fetchone()
    assert row is not None

    found = await find_model(db.sessions, row[0], BASE, "ours")
    async with db.sessions() as session:
        shown = await list_models(session, row[0], BASE)

    assert found is None
    assert [model.public_name for model in shown] == [BASE]
