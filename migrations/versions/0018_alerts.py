"""Alerts are kept, not only sent: a list of them that a tenant's people may read.

Revision: 0018, after 0017.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import Edit, edit_function, reverted, run_sql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# A trigger, for alerts are left in the outbox by several functions of the database and by the platform, and
# messages go from there once they are told. Whatever is odd about a payload must not stop who left it.
TABLE = r"""
CREATE TABLE alerts (
    id UUID NOT NULL,
    tenant_id UUID,
    kind VARCHAR(64) NOT NULL,
    payload JSONB NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_alerts PRIMARY KEY (id)
);
CREATE INDEX ix_alerts_tenant_id_id ON alerts (tenant_id, id);
-- Written by the trigger alone.
GRANT SELECT, DELETE ON alerts TO loraplex_app;
SELECT loraplex_guard_tenant_table('alerts');

CREATE FUNCTION loraplex_alert_tenant(payload jsonb) RETURNS uuid
    LANGUAGE sql IMMUTABLE
    AS $$
        SELECT CASE WHEN payload ->> 'tenant_id' ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
            THEN (payload ->> 'tenant_id')::uuid END
    $$;

-- A UUIDv7 of that time: lists go by it.
CREATE FUNCTION loraplex_alert_id(at timestamptz) RETURNS uuid
    LANGUAGE sql VOLATILE
    AS $$
        SELECT overlay(replace(gen_random_uuid()::text, '-', '') PLACING
            lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' FROM 1)::uuid
    $$;

CREATE FUNCTION loraplex_keep_alert() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        INSERT INTO alerts (id, tenant_id, kind, payload) VALUES (
            loraplex_alert_id(clock_timestamp()), loraplex_alert_tenant(NEW.payload),
            left(coalesce(NEW.payload ->> 'kind', 'limit_threshold'), 64), NEW.payload);
        RETURN NULL;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_keep_alert() FROM PUBLIC;
CREATE TRIGGER tr_outbox_keep_alert AFTER INSERT ON outbox
    FOR EACH ROW WHEN (NEW.topic = 'alert') EXECUTE FUNCTION loraplex_keep_alert();

-- Those that the outbox still has.
INSERT INTO alerts (id, tenant_id, kind, payload, at)
    SELECT loraplex_alert_id(created_at), loraplex_alert_tenant(payload),
        left(coalesce(payload ->> 'kind', 'limit_threshold'), 64), payload, created_at
    FROM outbox WHERE topic = 'alert';

ALTER TABLE retention_settings
    DROP CONSTRAINT ck_retention_settings_least, DROP CONSTRAINT ck_retention_settings_name,
    ADD CONSTRAINT ck_retention_settings_least CHECK (keep_days >= CASE name
        WHEN 'requests' THEN 62 WHEN 'audit_log' THEN 3650 WHEN 'invariant_runs' THEN 7
        WHEN 'webhook_deliveries' THEN 1 WHEN 'sessions' THEN 1 WHEN 'alerts' THEN 7 END),
    ADD CONSTRAINT ck_retention_settings_name CHECK (name in ('requests', 'audit_log',
        'invariant_runs', 'webhook_deliveries', 'sessions', 'alerts'));
"""

DROP = """
DELETE FROM retention_settings WHERE name = 'alerts';
ALTER TABLE retention_settings
    DROP CONSTRAINT ck_retention_settings_least, DROP CONSTRAINT ck_retention_settings_name,
    ADD CONSTRAINT ck_retention_settings_least CHECK (keep_days >= CASE name
        WHEN 'requests' THEN 62 WHEN 'audit_log' THEN 3650 WHEN 'invariant_runs' THEN 7
        WHEN 'webhook_deliveries' THEN 1 WHEN 'sessions' THEN 1 END),
    ADD CONSTRAINT ck_retention_settings_name CHECK (name in ('requests', 'audit_log',
        'invariant_runs', 'webhook_deliveries', 'sessions'));
DROP TRIGGER tr_outbox_keep_alert ON outbox;
DROP FUNCTION loraplex_keep_alert();
DROP FUNCTION loraplex_alert_id(timestamptz);
DROP FUNCTION loraplex_alert_tenant(jsonb);
DROP TABLE alerts;
"""

KEEP: tuple[Edit, ...] = (
    (
        "WHEN 'webhook_deliveries' THEN 30 WHEN 'sessions' THEN 30 END",
        "WHEN 'webhook_deliveries' THEN 30 WHEN 'sessions' THEN 30\n"
        "                WHEN 'alerts' THEN 400 END",
    ),
)

# They name its models, and say why a pin was made.
ERASE: tuple[Edit, ...] = (
    (
        "        DELETE FROM webhooks WHERE tenant_id = wanted;\n",
        "        DELETE FROM alerts WHERE tenant_id = wanted;\n"
        "        DELETE FROM webhooks WHERE tenant_id = wanted;\n",
    ),
)

FUNCTIONS: tuple[tuple[str, tuple[Edit, ...]], ...] = (
    ("loraplex_keep_days", KEEP),
    ("loraplex_erase_tenant", ERASE),
)


def upgrade() -> None:
    run_sql(TABLE)
    for name, edits in FUNCTIONS:
        edit_function(name, *edits)


def downgrade() -> None:
    for name, edits in reversed(FUNCTIONS):
        edit_function(name, *reverted(*edits))
    run_sql(DROP)
