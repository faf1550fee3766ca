"""Hash-chained audit log, retention by partitions, stored checks of the books, webhooks.

Revision: 0008, after 0007.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# One chain per tenant and one for the platform (the nil UUID). A row is linked when its transaction
# commits, not when it is inserted: the lock of a chain's head is then the last thing that a transaction
# takes, the heads of several chains are locked in one order, and so audit rows cannot cause a deadlock.
AUDIT = """
ALTER TABLE audit_log
    ADD COLUMN before JSONB,
    ADD COLUMN after JSONB,
    ADD COLUMN chain UUID,
    ADD COLUMN seq BIGINT,
    ADD COLUMN prev_hash BYTEA,
    ADD COLUMN hash BYTEA;
UPDATE audit_log SET chain = coalesce(tenant_id, '00000000-0000-0000-0000-000000000000');
ALTER TABLE audit_log ALTER COLUMN chain SET NOT NULL;

CREATE TABLE audit_heads (
    chain UUID NOT NULL,
    seq BIGINT NOT NULL,
    hash BYTEA NOT NULL,
    first_seq BIGINT DEFAULT 1 NOT NULL,
    first_prev_hash BYTEA NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_audit_heads PRIMARY KEY (chain)
);

CREATE FUNCTION loraplex_audit_digest(entry audit_log) RETURNS bytea
    LANGUAGE sql STABLE
    -- jsonb's text has one order of keys and one way to write each value, so it is canonical.
    AS $$
        SELECT sha256(entry.prev_hash || convert_to(jsonb_build_object(
            'chain', entry.chain, 'seq', entry.seq, 'id', entry.id,
            'at_us', (extract(epoch FROM entry.at) * 1000000)::bigint,
            'actor_kind', entry.actor_kind, 'actor_id', entry.actor_id,
            'request_id', entry.request_id, 'action', entry.action,
            'object_kind', entry.object_kind, 'object_id', entry.object_id,
            'tenant_id', entry.tenant_id, 'detail', entry.detail,
            'before', entry.before, 'after', entry.after)::text, 'UTF8'))
    $$;

CREATE FUNCTION loraplex_audit_genesis(chain uuid) RETURNS bytea
    LANGUAGE sql IMMUTABLE STRICT
    AS $$ SELECT sha256(convert_to('loraplex audit ' || chain, 'UTF8')) $$;

CREATE FUNCTION loraplex_audit_link(wanted uuid) RETURNS void
    LANGUAGE plpgsql
    -- The runtime role may not change audit rows, nor touch the heads.
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        entry audit_log;
        head audit_heads;
    BEGIN
        -- Unlinked rows that this transaction can see are its own: all chains that it will need.
        INSERT INTO audit_heads (chain, seq, hash, first_prev_hash)
            SELECT chain, 0, loraplex_audit_genesis(chain), loraplex_audit_genesis(chain)
            FROM (SELECT DISTINCT chain FROM audit_log WHERE hash IS NULL) AS own
            ORDER BY chain
            ON CONFLICT DO NOTHING;
        PERFORM 1 FROM audit_heads
            WHERE chain IN (SELECT chain FROM audit_log WHERE hash IS NULL)
            ORDER BY chain FOR UPDATE;
        SELECT * INTO entry FROM audit_log WHERE id = wanted AND hash IS NULL;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        SELECT * INTO STRICT head FROM audit_heads WHERE chain = entry.chain;
        entry.seq := head.seq + 1;
        entry.prev_hash := head.hash;
        entry.hash := loraplex_audit_digest(entry);
        UPDATE audit_log SET seq = entry.seq, prev_hash = entry.prev_hash, hash = entry.hash
            WHERE id = entry.id;
        UPDATE audit_heads SET seq = entry.seq, hash = entry.hash, updated_at = now()
            WHERE chain = entry.chain;
    END
    $$;

CREATE INDEX ix_audit_log_unlinked ON audit_log (chain) WHERE hash is null;
SELECT loraplex_audit_link(id) FROM (SELECT id FROM audit_log ORDER BY id) AS earlier;
CREATE UNIQUE INDEX uq_audit_log_chain_seq ON audit_log (chain, seq);

CREATE FUNCTION loraplex_audit_before() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
    BEGIN
        -- Nobody chooses when something happened, nor where it stands in the chain.
        NEW.at := now();
        NEW.chain := coalesce(NEW.tenant_id, '00000000-0000-0000-0000-000000000000');
        NEW.seq := NULL;
        NEW.prev_hash := NULL;
        NEW.hash := NULL;
        RETURN NEW;
    END
    $$;
CREATE TRIGGER tr_audit_log_before BEFORE INSERT ON audit_log
    FOR EACH ROW EXECUTE FUNCTION loraplex_audit_before();

CREATE FUNCTION loraplex_audit_commit() RETURNS trigger
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        PERFORM loraplex_audit_link(NEW.id);
        RETURN NULL;
    END
    $$;
CREATE CONSTRAINT TRIGGER tr_audit_log_commit AFTER INSERT ON audit_log
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION loraplex_audit_commit();

REVOKE EXECUTE ON FUNCTION loraplex_audit_link(uuid) FROM PUBLIC;
GRANT SELECT ON audit_heads TO loraplex_app;
"""

# Attempts and landed journal entries go with the requests that they belong to, so they have the same
# months. `loraplex_make_partitions` asks the catalog which tables have months, and so need not be
# changed for the next one.
PARTITIONS = """
ALTER TABLE attempts RENAME TO flat_attempts;
ALTER INDEX pk_attempts RENAME TO pk_flat_attempts;
CREATE TABLE attempts (
    LIKE flat_attempts INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    CONSTRAINT pk_attempts PRIMARY KEY (request_id, attempt)
) PARTITION BY RANGE (request_id);
CREATE TABLE attempts_default PARTITION OF attempts DEFAULT;
INSERT INTO attempts SELECT * FROM flat_attempts;
DROP TABLE flat_attempts;
GRANT SELECT, INSERT ON attempts TO loraplex_app;

ALTER TABLE engine_usage RENAME TO flat_engine_usage;
ALTER INDEX pk_engine_usage RENAME TO pk_flat_engine_usage;
CREATE TABLE engine_usage (
    LIKE flat_engine_usage INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    CONSTRAINT pk_engine_usage PRIMARY KEY (request_id, attempt)
) PARTITION BY RANGE (request_id);
CREATE TABLE engine_usage_default PARTITION OF engine_usage DEFAULT;
INSERT INTO engine_usage SELECT * FROM flat_engine_usage;
DROP TABLE flat_engine_usage;
GRANT SELECT, INSERT ON engine_usage TO loraplex_app;

CREATE OR REPLACE FUNCTION loraplex_make_partitions(months_ahead integer) RETURNS integer
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        parent text;
        key_column text;
        month_start timestamptz;
        lower_bound uuid;
        upper_bound uuid;
        child text;
        made integer := 0;
    BEGIN
        IF months_ahead NOT BETWEEN 0 AND 24 THEN
            RAISE EXCEPTION 'months_ahead must be between 0 and 24';
        END IF;
        -- Two workers would make the same table; the second waits and finds it made.
        PERFORM pg_advisory_xact_lock(hashtext('loraplex_make_partitions'));
        FOR parent, key_column IN
            SELECT c.relname, a.attname
            FROM pg_partitioned_table p
            JOIN pg_class c ON c.oid = p.partrelid
            JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = p.partattrs[0]
            WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = current_schema())
                AND p.partstrat = 'r' AND a.atttypid = 'uuid'::regtype
            ORDER BY c.relname
        LOOP
            FOR offset_months IN -1 .. months_ahead LOOP
                month_start := (date_trunc('month', now() AT TIME ZONE 'UTC')
                    + make_interval(months => offset_months)) AT TIME ZONE 'UTC';
                child := parent || to_char(month_start AT TIME ZONE 'UTC', '"_y"YYYY"m"MM');
                CONTINUE WHEN to_regclass(quote_ident(child)) IS NOT NULL;
                lower_bound := loraplex_uuid7_floor(month_start);
                upper_bound := loraplex_uuid7_floor((month_start AT TIME ZONE 'UTC'
                    + interval '1 month') AT TIME ZONE 'UTC');
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', child, parent);
                EXECUTE format(
                    'WITH moved AS (DELETE FROM %I WHERE %I >= %L AND %I < %L RETURNING *)'
                    ' INSERT INTO %I SELECT * FROM moved',
                    parent || '_default', key_column, lower_bound, key_column, upper_bound, child);
                EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                    parent, child, lower_bound, upper_bound);
                made := made + 1;
            END LOOP;
        END LOOP;
        RETURN made;
    END
    $$;
SELECT loraplex_make_partitions(2);
"""

# What is kept for how long. The least is the table's own: no one who serves can go below it.
RETENTION = """
CREATE TABLE retention_settings (
    name VARCHAR(32) NOT NULL,
    keep_days INTEGER,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_retention_settings PRIMARY KEY (name),
    CONSTRAINT ck_retention_settings_least CHECK (keep_days >= CASE name
        WHEN 'requests' THEN 62 WHEN 'audit_log' THEN 3650 WHEN 'invariant_runs' THEN 7
        WHEN 'webhook_deliveries' THEN 1 WHEN 'sessions' THEN 1 END),
    CONSTRAINT ck_retention_settings_name CHECK (name in ('requests', 'audit_log',
        'invariant_runs', 'webhook_deliveries', 'sessions'))
);
GRANT SELECT, INSERT, UPDATE ON retention_settings TO loraplex_app;

CREATE FUNCTION loraplex_keep_days(wanted text) RETURNS integer
    LANGUAGE sql STABLE
    -- Null: for ever. A setting of null says so too, which is not the same as no setting.
    AS $$
        SELECT CASE WHEN EXISTS (SELECT FROM retention_settings WHERE name = wanted)
            THEN (SELECT keep_days FROM retention_settings WHERE name = wanted)
            ELSE CASE wanted WHEN 'requests' THEN 400 WHEN 'invariant_runs' THEN 90
                WHEN 'webhook_deliveries' THEN 30 WHEN 'sessions' THEN 30 END
        END
    $$;

CREATE TABLE dropped_months (
    month DATE NOT NULL,
    dropped_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    requests BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    engine_usage BIGINT NOT NULL,
    CONSTRAINT pk_dropped_months PRIMARY KEY (month)
);
GRANT SELECT ON dropped_months TO loraplex_app;

-- The oldest `most` of them, or all: each is counted.
CREATE FUNCTION loraplex_months_to_drop(
        most integer, OUT month date, OUT blocked_by text, OUT requests bigint)
    RETURNS SETOF record
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        keep_days integer := loraplex_keep_days('requests');
        reserved bigint;
        dirty bigint := 0;
    BEGIN
        FOR month IN
            SELECT to_date(right(c.relname, 7), 'YYYY"m"MM') AS start
            FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
            WHERE i.inhparent = 'requests'::regclass AND c.relname ~ '^requests_y[0-9]{4}m[0-9]{2}$'
            ORDER BY 1
            LIMIT most
        LOOP
            EXIT WHEN keep_days IS NULL OR (month + interval '1 month') AT TIME ZONE 'UTC'
                > now() - make_interval(days => keep_days);
            EXECUTE format('SELECT count(*), count(*) FILTER (WHERE state = ''reserved'') FROM %I',
                'requests' || to_char(month, '"_y"YYYY"m"MM')) INTO requests, reserved;
            -- A day in some zone may begin or end half a day beside that of UTC.
            SELECT count(DISTINCT (d.tenant_id, d.day)) INTO dirty FROM rollup_dirty d
                WHERE d.day BETWEEN month - 1 AND (month + interval '1 month')::date;
            blocked_by := CASE
                WHEN reserved > 0 THEN reserved || ' reserved requests'
                WHEN dirty > 0 THEN dirty || ' days that are not rolled up' END;
            RETURN NEXT;
            -- Only from the oldest on: what is kept has one beginning.
            EXIT WHEN blocked_by IS NOT NULL;
        END LOOP;
    END
    $$;

-- The oldest month that may go, if any; how many went. One a transaction: a drop locks the parent, and so
-- stops every gateway, until the commit. What takes long, the counting, is done before the first lock.
CREATE FUNCTION loraplex_drop_month() RETURNS integer
    LANGUAGE plpgsql
    -- Rather try again in an hour than wait while others wait for what is locked already.
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp SET lock_timeout = '2s'
    AS $$
    DECLARE
        due record;
        parent text;
        suffix text;
        counts jsonb;
        counted bigint;
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtext('loraplex_make_partitions'));
        SELECT * INTO due FROM loraplex_months_to_drop(1) WHERE blocked_by IS NULL;
        IF NOT FOUND THEN
            RETURN 0;
        END IF;
        suffix := to_char(due.month, '"_y"YYYY"m"MM');
        counts := jsonb_build_object('requests', due.requests);
        FOREACH parent IN ARRAY ARRAY['attempts', 'engine_usage'] LOOP
            counted := 0;
            IF to_regclass(parent || suffix) IS NOT NULL THEN
                EXECUTE format('SELECT count(*) FROM %I', parent || suffix) INTO counted;
            END IF;
            counts := counts || jsonb_build_object(parent, counted);
        END LOOP;
        FOREACH parent IN ARRAY ARRAY['requests', 'attempts', 'engine_usage'] LOOP
            EXECUTE format('DROP TABLE IF EXISTS %I', parent || suffix);
        END LOOP;
        INSERT INTO dropped_months (month, requests, attempts, engine_usage)
            VALUES (due.month, (counts ->> 'requests')::bigint, (counts ->> 'attempts')::bigint,
                (counts ->> 'engine_usage')::bigint);
        RETURN 1;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RETURN 0;
    END
    $$;

CREATE FUNCTION loraplex_drop_audit() RETURNS bigint
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        keep_days integer := loraplex_keep_days('audit_log');
        head audit_heads;
        last audit_log;
        gone bigint := 0;
        counted bigint;
    BEGIN
        IF keep_days IS NULL THEN
            RETURN 0;
        END IF;
        FOR head IN SELECT * FROM audit_heads ORDER BY chain FOR UPDATE LOOP
            -- The chain goes on from what the last dropped row said, so the rest stays proven.
            SELECT * INTO last FROM audit_log WHERE chain = head.chain
                AND at < now() - make_interval(days => keep_days) ORDER BY seq DESC LIMIT 1;
            CONTINUE WHEN NOT FOUND;
            DELETE FROM audit_log WHERE chain = head.chain AND seq <= last.seq;
            GET DIAGNOSTICS counted = ROW_COUNT;
            gone := gone + counted;
            UPDATE audit_heads SET first_seq = last.seq + 1, first_prev_hash = last.hash
                WHERE chain = head.chain;
        END LOOP;
        RETURN gone;
    END
    $$;

REVOKE EXECUTE ON FUNCTION loraplex_months_to_drop(integer), loraplex_drop_month(),
    loraplex_drop_audit() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_months_to_drop(integer), loraplex_drop_month(),
    loraplex_drop_audit() TO loraplex_app;
"""

# Deleting a tenant: what is theirs goes, what the law wants of a business stays. As the owner, since the
# serving role may not delete most of it; once erased, a tenant stays so.
ERASURE = """
ALTER TABLE tenants ADD COLUMN erased_at TIMESTAMP WITH TIME ZONE;
ALTER TABLE tenants ADD CONSTRAINT ck_tenants_erased CHECK (erased_at is null or status = 'closed');

CREATE FUNCTION loraplex_erase_tenant(wanted uuid) RETURNS jsonb
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        gone text := 'deleted-' || replace(wanted::text, '-', '');
        api_id text := 'ten_' || replace(wanted::text, '-', '');
        own_users uuid[];
        done jsonb := '{}';
        counted bigint;
    BEGIN
        PERFORM 1 FROM tenants WHERE id = wanted AND erased_at IS NULL FOR UPDATE;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        -- The last invoices are still to be made out to somebody.
        INSERT INTO billing_profiles (tenant_id, legal_name, address)
            SELECT id, name, '' FROM tenants WHERE id = wanted
            ON CONFLICT DO NOTHING;
        UPDATE tenants SET status = 'closed', erased_at = now(), slug = gone, name = 'Deleted tenant',
            replays_answers = false WHERE id = wanted;

        DELETE FROM idempotent_requests WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('stored_answers', counted);
        DELETE FROM key_model_grants WHERE tenant_id = wanted;
        DELETE FROM api_key_secrets s USING api_keys k WHERE s.key_id = k.id AND k.tenant_id = wanted;
        UPDATE api_keys SET status = 'revoked', revoked_at = coalesce(revoked_at, now()),
            revoke_reason = 'The tenant was deleted.', name = 'deleted', ip_allow = '{}',
            created_by = NULL, owner_user_id = NULL, version = version + 1
            WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('api_keys', counted);

        SELECT array_agg(u.id) INTO own_users FROM users u
            WHERE u.platform_role IS NULL
            AND EXISTS (SELECT FROM memberships m WHERE m.user_id = u.id AND m.tenant_id = wanted)
            AND NOT EXISTS (SELECT FROM memberships m
                WHERE m.user_id = u.id AND m.tenant_id <> wanted);
        -- Replies kept for a day under an Idempotency-Key: all of those people, and of everybody else but
        -- the operator those that are about this tenant.
        DELETE FROM idempotency i WHERE i.principal IN (
                SELECT 'user:usr_' || replace(id::text, '-', '') FROM unnest(own_users) AS id)
            OR i.principal LIKE 'user:%' AND (strpos(i.route, api_id) > 0
                OR strpos(i.response::text, api_id) > 0)
            AND NOT EXISTS (SELECT FROM users u WHERE u.platform_role IS NOT NULL
                AND i.principal = 'user:usr_' || replace(u.id::text, '-', ''));
        DELETE FROM memberships WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('memberships', counted);
        DELETE FROM invitations WHERE tenant_id = wanted;
        DELETE FROM sessions WHERE user_id = ANY (own_users);
        UPDATE users SET email = 'deleted-' || replace(id::text, '-', '') || '@invalid',
            password_hash = NULL, oidc_issuer = NULL, oidc_subject = NULL,
            disabled_at = coalesce(disabled_at, now())
            WHERE id = ANY (own_users);
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('users', counted);

        UPDATE projects SET name = 'deleted-' || replace(id::text, '-', ''),
            archived_at = coalesce(archived_at, now()) WHERE tenant_id = wanted;
        UPDATE deployments SET public_name = 'deleted-' || replace(id::text, '-', ''),
            archived_at = coalesce(archived_at, now()) WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('deployments', counted);
        UPDATE deployment_revisions SET params = '{}' WHERE tenant_id = wanted;
        UPDATE adapters SET name = 'deleted-' || replace(id::text, '-', '') WHERE tenant_id = wanted;
        UPDATE adapter_versions SET status = 'retired', report = '{}' WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('adapter_versions', counted);

        DELETE FROM webhooks WHERE tenant_id = wanted;
        GET DIAGNOSTICS counted = ROW_COUNT;
        done := done || jsonb_build_object('webhooks', counted);
        DELETE FROM webhook_deliveries WHERE tenant_id = wanted;
        DELETE FROM refusals WHERE tenant_id = wanted;
        RETURN done;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_erase_tenant(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_erase_tenant(uuid) TO loraplex_app;
"""

CHECKS = """
CREATE TABLE invariant_runs (
    id UUID NOT NULL,
    checked_at TIMESTAMP WITH TIME ZONE NOT NULL,
    checked_by VARCHAR(64) NOT NULL,
    since TIMESTAMP WITH TIME ZONE,
    is_ok BOOLEAN NOT NULL,
    took_ms INTEGER NOT NULL,
    report JSONB NOT NULL,
    CONSTRAINT pk_invariant_runs PRIMARY KEY (id)
);
GRANT SELECT, INSERT, DELETE ON invariant_runs TO loraplex_app;
"""

WEBHOOKS = """
CREATE TABLE webhooks (
    id UUID NOT NULL,
    tenant_id UUID,
    url VARCHAR(2000) NOT NULL,
    description VARCHAR(200) DEFAULT '' NOT NULL,
    topics VARCHAR(64)[] NOT NULL,
    status VARCHAR(16) DEFAULT 'enabled' NOT NULL,
    secret_box BYTEA NOT NULL,
    secret_key_id VARCHAR(16) NOT NULL,
    old_secret_box BYTEA,
    old_secret_key_id VARCHAR(16),
    old_secret_until TIMESTAMP WITH TIME ZONE,
    failing_since TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    disabled_at TIMESTAMP WITH TIME ZONE,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_webhooks PRIMARY KEY (id),
    CONSTRAINT fk_webhooks_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_webhooks_status CHECK (status in ('enabled', 'disabled', 'failed')),
    CONSTRAINT ck_webhooks_old_secret CHECK (
        (old_secret_box is null) = (old_secret_key_id is null)
        and (old_secret_box is null) = (old_secret_until is null))
);
CREATE INDEX ix_webhooks_tenant_id_id ON webhooks (tenant_id, id);

CREATE TABLE webhook_deliveries (
    id UUID NOT NULL,
    webhook_id UUID NOT NULL,
    tenant_id UUID,
    topic VARCHAR(64) NOT NULL,
    dedupe_key VARCHAR(200) NOT NULL,
    payload JSONB NOT NULL,
    occurred_at TIMESTAMP WITH TIME ZONE NOT NULL,
    status VARCHAR(16) DEFAULT 'pending' NOT NULL,
    tries INTEGER DEFAULT 0 NOT NULL,
    next_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    give_up_at TIMESTAMP WITH TIME ZONE NOT NULL,
    lease_token UUID,
    last_tried_at TIMESTAMP WITH TIME ZONE,
    last_status INTEGER,
    last_error VARCHAR(300),
    delivered_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_webhook_deliveries PRIMARY KEY (id),
    CONSTRAINT fk_webhook_deliveries_webhook_id_webhooks FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE,
    CONSTRAINT uq_webhook_deliveries_webhook_id_topic_dedupe_key UNIQUE (webhook_id, topic, dedupe_key),
    CONSTRAINT ck_webhook_deliveries_status CHECK (status in ('pending', 'delivered', 'failed')),
    CONSTRAINT ck_webhook_deliveries_delivered CHECK ((status = 'delivered') = (delivered_at is not null))
);
CREATE INDEX ix_webhook_deliveries_webhook_id_id ON webhook_deliveries (webhook_id, id);
CREATE INDEX ix_webhook_deliveries_next_at ON webhook_deliveries (next_at) WHERE status = 'pending';

GRANT SELECT, INSERT, UPDATE, DELETE ON webhooks, webhook_deliveries TO loraplex_app;
"""

# `loraplex_make_partitions` stays: it makes what the catalog says, also before this revision.
DROP = """
DROP FUNCTION loraplex_erase_tenant(uuid);
ALTER TABLE tenants DROP CONSTRAINT ck_tenants_erased, DROP COLUMN erased_at;
DROP TABLE webhook_deliveries, webhooks, invariant_runs, dropped_months;
DROP FUNCTION loraplex_drop_audit();
DROP FUNCTION loraplex_drop_month();
DROP FUNCTION loraplex_months_to_drop(integer);
DROP FUNCTION loraplex_keep_days(text);
DROP TABLE retention_settings;

ALTER TABLE attempts RENAME TO monthly_attempts;
ALTER INDEX pk_attempts RENAME TO pk_monthly_attempts;
CREATE TABLE attempts (
    LIKE monthly_attempts INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    CONSTRAINT pk_attempts PRIMARY KEY (request_id, attempt)
);
INSERT INTO attempts SELECT * FROM monthly_attempts;
DROP TABLE monthly_attempts;
GRANT SELECT, INSERT ON attempts TO loraplex_app;
ALTER TABLE engine_usage RENAME TO monthly_engine_usage;
ALTER INDEX pk_engine_usage RENAME TO pk_monthly_engine_usage;
CREATE TABLE engine_usage (
    LIKE monthly_engine_usage INCLUDING DEFAULTS INCLUDING CONSTRAINTS,
    CONSTRAINT pk_engine_usage PRIMARY KEY (request_id, attempt)
);
INSERT INTO engine_usage SELECT * FROM monthly_engine_usage;
DROP TABLE monthly_engine_usage;
GRANT SELECT, INSERT ON engine_usage TO loraplex_app;

DROP TRIGGER tr_audit_log_commit ON audit_log;
DROP TRIGGER tr_audit_log_before ON audit_log;
DROP FUNCTION loraplex_audit_commit();
DROP FUNCTION loraplex_audit_before();
DROP FUNCTION loraplex_audit_link(uuid);
DROP FUNCTION loraplex_audit_digest(audit_log);
DROP FUNCTION loraplex_audit_genesis(uuid);
DROP INDEX ix_audit_log_unlinked;
DROP INDEX uq_audit_log_chain_seq;
ALTER TABLE audit_log DROP COLUMN before, DROP COLUMN after, DROP COLUMN chain, DROP COLUMN seq,
    DROP COLUMN prev_hash, DROP COLUMN hash;
DROP TABLE audit_heads;
"""


def upgrade() -> None:
    run_sql(AUDIT, PARTITIONS, RETENTION, CHECKS, WEBHOOKS, ERASURE)


def downgrade() -> None:
    run_sql(DROP)
