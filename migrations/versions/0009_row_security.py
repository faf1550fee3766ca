"""Row-level security: what the role of a tenant's transaction may see and do.

Revision: 0009, after 0008, so that it finds the tables of all of them. A table that comes later and has
a tenant calls `loraplex_guard_tenant_table` in its own migration; tests/platform/db/test_row_security.py
fails until it does. Why a role of its own, and why not FORCE: docs/adr/0007.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

ROLE = """
DO $$
BEGIN
    -- Roles belong to the server: another database of ours, or an administrator, may have made it.
    IF to_regrole('loraplex_tenant') IS NULL THEN
        CREATE ROLE loraplex_tenant NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;  -- by someone else, just now
END
$$;
DO $$
BEGIN
    -- Who serves as loraplex_app may go down to it for a transaction; never the other way round.
    IF NOT pg_has_role('loraplex_app', 'loraplex_tenant', 'MEMBER') THEN
        GRANT loraplex_tenant TO loraplex_app;
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;  -- an administrator made the roles, and says who is in them
END
$$;
GRANT USAGE ON SCHEMA @@SCHEMA@@ TO loraplex_tenant;
"""

GUARD = """
-- The tenants of this transaction; null, and so no row anywhere, unless it said so.
CREATE FUNCTION loraplex_tenant_ids() RETURNS uuid[]
    LANGUAGE sql STABLE PARALLEL SAFE
    AS $$ SELECT nullif(current_setting('app.tenant_ids', true), '')::uuid[] $$;

-- Guard one table: the platform's role sees all of it, a tenant's transaction what `visible` says.
CREATE FUNCTION loraplex_guard_table(guarded regclass, visible text) RETURNS void
    LANGUAGE plpgsql
    AS $guard$
    BEGIN
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', guarded);
        EXECUTE format('CREATE POLICY platform ON %s TO loraplex_app USING (true) WITH CHECK (true)',
            guarded);
        EXECUTE format('CREATE POLICY tenant ON %s TO loraplex_tenant USING (%s) WITH CHECK (%s)',
            guarded, visible, visible);
    END
    $guard$;

-- A table with a tenant_id: its own rows, to read. What may be written is granted table by table.
CREATE FUNCTION loraplex_guard_tenant_table(guarded regclass) RETURNS void
    LANGUAGE plpgsql
    AS $guard$
    BEGIN
        PERFORM loraplex_guard_table(guarded,
            'tenant_id = ANY ((SELECT loraplex_tenant_ids())::uuid[])');
        EXECUTE format('GRANT SELECT ON %s TO loraplex_tenant', guarded);
    END
    $guard$;
REVOKE EXECUTE ON FUNCTION loraplex_guard_table(regclass, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION loraplex_guard_tenant_table(regclass) FROM PUBLIC;

DO $$
DECLARE
    guarded regclass;
BEGIN
    -- Partitions are reached through their parent, whose policies hold then; nobody but the owner
    -- has a right to them themselves.
    FOR guarded IN
        SELECT c.oid::regclass FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped
        WHERE c.relnamespace = '@@SCHEMA@@'::regnamespace AND c.relkind IN ('r', 'p')
            AND NOT c.relispartition
        ORDER BY c.relname
    LOOP
        PERFORM loraplex_guard_tenant_table(guarded);
    END LOOP;
END
$$;
"""

# Tables without a tenant_id of their own, or of which everybody may see a part.
OTHERS = """
SELECT loraplex_guard_table('tenants', 'id = ANY ((SELECT loraplex_tenant_ids())::uuid[])');
GRANT SELECT ON tenants TO loraplex_tenant;

-- Colleagues, without what they log in with.
SELECT loraplex_guard_table('users',
    'EXISTS (SELECT FROM memberships m WHERE m.user_id = users.id)');
GRANT SELECT (id, email, created_at, disabled_at) ON users TO loraplex_tenant;

SELECT loraplex_guard_table('api_key_secrets',
    'EXISTS (SELECT FROM api_keys k WHERE k.id = api_key_secrets.key_id)');
GRANT SELECT (id, key_id, pepper_version, valid_from, valid_until) ON api_key_secrets
    TO loraplex_tenant;

-- A tenant's chain has the tenant's id.
SELECT loraplex_guard_table('audit_heads', 'chain = ANY ((SELECT loraplex_tenant_ids())::uuid[])');
GRANT SELECT ON audit_heads TO loraplex_tenant;

-- The base model's deployments are the platform's, and everybody's to call.
CREATE POLICY platforms_own ON deployments FOR SELECT TO loraplex_tenant USING (tenant_id IS NULL);
CREATE POLICY platforms_own ON deployment_revisions FOR SELECT TO loraplex_tenant
    USING (tenant_id IS NULL);
-- Two tables that are about nobody.
GRANT SELECT ON base_models, dropped_months TO loraplex_tenant;
"""

# What a member's request may write; which role may is the control API's table of permissions.
WRITES = """
GRANT UPDATE (name, billing_tz, replays_answers, row_version) ON tenants TO loraplex_tenant;
GRANT INSERT, UPDATE, DELETE ON memberships, key_model_grants, webhooks, webhook_deliveries
    TO loraplex_tenant;
GRANT INSERT, UPDATE ON invitations, projects, api_keys, adapters, deployments TO loraplex_tenant;
GRANT INSERT, UPDATE (valid_until) ON api_key_secrets TO loraplex_tenant;
GRANT INSERT, UPDATE (status) ON adapter_versions TO loraplex_tenant;
GRANT INSERT ON deployment_revisions, audit_log TO loraplex_tenant;
"""

# The role stays: other databases of this server may use it.
DROP = """
DO $$
DECLARE
    policy record;
BEGIN
    FOR policy IN SELECT * FROM pg_policies WHERE schemaname = '@@SCHEMA@@' LOOP
        EXECUTE format('DROP POLICY %I ON %I', policy.policyname, policy.tablename);
        EXECUTE format('ALTER TABLE %I DISABLE ROW LEVEL SECURITY', policy.tablename);
    END LOOP;
END
$$;
REVOKE ALL ON ALL TABLES IN SCHEMA @@SCHEMA@@ FROM loraplex_tenant;
REVOKE USAGE ON SCHEMA @@SCHEMA@@ FROM loraplex_tenant;
DROP FUNCTION loraplex_guard_tenant_table(regclass);
DROP FUNCTION loraplex_guard_table(regclass, text);
DROP FUNCTION loraplex_tenant_ids();
"""


def upgrade() -> None:
    run_sql(ROLE, GUARD, OTHERS, WRITES)


def downgrade() -> None:
    run_sql(DROP)
