"""Versions of keys and tenants are published by the database itself; the outbox's dead letters.

Whoever changes what a key or a tenant may do makes its version grow, and a message to the gateways
is left in the same transaction: by triggers, so that no code can forget to.

Revision: 0006, after 0005.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

OUTBOX = """
ALTER TABLE outbox ADD COLUMN dead_at TIMESTAMP WITH TIME ZONE;
DROP INDEX ix_outbox_topic_next_at;
CREATE INDEX ix_outbox_topic_next_at ON outbox (topic, next_at)
    WHERE done_at is null and dead_at is null;
CREATE INDEX ix_outbox_done_at ON outbox (done_at) WHERE done_at is not null;
"""

VERSIONS = """
CREATE FUNCTION loraplex_bump_key_version() RETURNS trigger
LANGUAGE plpgsql SET search_path = @@SCHEMA@@, pg_temp AS $$
BEGIN
    IF new.version <= old.version THEN
        new.version := old.version + 1;
    END IF;
    RETURN new;
END
$$;

-- As the owner: whoever may change a key need not be allowed to write to the outbox.
CREATE FUNCTION loraplex_publish_key_version() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp AS $$
BEGIN
    INSERT INTO outbox (topic, dedupe_key, payload)
    VALUES ('version', 'key:' || new.id || ':' || new.version, jsonb_build_object(
        'tenant_id', new.tenant_id, 'key_id', new.id, 'version', new.version))
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;

CREATE FUNCTION loraplex_bump_tenant_version() RETURNS trigger
LANGUAGE plpgsql SET search_path = @@SCHEMA@@, pg_temp AS $$
BEGIN
    IF new.row_version <= old.row_version THEN
        new.row_version := old.row_version + 1;
    END IF;
    RETURN new;
END
$$;

CREATE FUNCTION loraplex_publish_tenant_version() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp AS $$
DECLARE
    limits_version bigint := coalesce((to_jsonb(new) ->> 'limits_version')::bigint, 0);
BEGIN
    INSERT INTO outbox (topic, dedupe_key, payload)
    VALUES ('version', 'tenant:' || new.id || ':' || new.row_version || ':' || limits_version,
        jsonb_build_object('tenant_id', new.id, 'version', new.row_version,
            'limits_version', limits_version))
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;

-- Left out is what no gateway remembers of a key (when it was last used) and what has a version of
-- its own (a tenant's limits).
CREATE TRIGGER bump_key_version BEFORE UPDATE ON api_keys FOR EACH ROW
    WHEN ((to_jsonb(old) - 'last_used_at' - 'version') <> (to_jsonb(new) - 'last_used_at' - 'version'))
    EXECUTE FUNCTION loraplex_bump_key_version();
CREATE TRIGGER publish_key_version AFTER UPDATE ON api_keys FOR EACH ROW
    WHEN (new.version <> old.version) EXECUTE FUNCTION loraplex_publish_key_version();
CREATE TRIGGER bump_tenant_version BEFORE UPDATE ON tenants FOR EACH ROW
    WHEN ((to_jsonb(old) - 'limits_version' - 'row_version')
        <> (to_jsonb(new) - 'limits_version' - 'row_version'))
    EXECUTE FUNCTION loraplex_bump_tenant_version();
CREATE TRIGGER publish_tenant_version AFTER UPDATE ON tenants FOR EACH ROW
    WHEN (new.row_version <> old.row_version
        OR (to_jsonb(new) -> 'limits_version') IS DISTINCT FROM (to_jsonb(old) -> 'limits_version'))
    EXECUTE FUNCTION loraplex_publish_tenant_version();
"""

DROP = """
DROP TRIGGER publish_tenant_version ON tenants;
DROP TRIGGER bump_tenant_version ON tenants;
DROP TRIGGER publish_key_version ON api_keys;
DROP TRIGGER bump_key_version ON api_keys;
DROP FUNCTION loraplex_publish_tenant_version();
DROP FUNCTION loraplex_bump_tenant_version();
DROP FUNCTION loraplex_publish_key_version();
DROP FUNCTION loraplex_bump_key_version();
DROP INDEX ix_outbox_done_at;
DROP INDEX ix_outbox_topic_next_at;
CREATE INDEX ix_outbox_topic_next_at ON outbox (topic, next_at) WHERE done_at is null;
ALTER TABLE outbox DROP COLUMN dead_at;
"""


def upgrade() -> None:
    run_sql(OUTBOX, VERSIONS)


def downgrade() -> None:
    run_sql(DROP)
