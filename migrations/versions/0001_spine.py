"""The spine: every table of the first issue, the runtime role, partitions, the first price book.

Revision: 0001, the first.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
-- Tenants, keys, people

CREATE TABLE tenants (
    id UUID NOT NULL,
    slug VARCHAR(63) NOT NULL,
    name VARCHAR(200) NOT NULL,
    status VARCHAR(16) DEFAULT 'active' NOT NULL,
    billing_tz VARCHAR(64) DEFAULT 'UTC' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_tenants PRIMARY KEY (id),
    CONSTRAINT ck_tenants_status CHECK (status in ('active', 'suspended', 'closed')),
    CONSTRAINT ck_tenants_slug CHECK (slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    CONSTRAINT uq_tenants_slug UNIQUE (slug)
);

CREATE TABLE api_keys (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    public_id VARCHAR(16) NOT NULL,
    last4 VARCHAR(4) NOT NULL,
    status VARCHAR(16) DEFAULT 'active' NOT NULL,
    version INTEGER DEFAULT 1 NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    last_used_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_api_keys PRIMARY KEY (id),
    CONSTRAINT ck_api_keys_status CHECK (status in ('active', 'revoked')),
    CONSTRAINT ck_api_keys_revoked CHECK ((status = 'revoked') = (revoked_at is not null)),
    CONSTRAINT fk_api_keys_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT uq_api_keys_public_id UNIQUE (public_id)
);
CREATE INDEX ix_api_keys_tenant_id_created_at_id ON api_keys (tenant_id, created_at, id);
CREATE UNIQUE INDEX uq_api_keys_tenant_id_id ON api_keys (tenant_id, id);

CREATE TABLE api_key_secrets (
    id UUID NOT NULL,
    key_id UUID NOT NULL,
    mac BYTEA NOT NULL,
    pepper_version INTEGER DEFAULT 1 NOT NULL,
    valid_from TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    valid_until TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_api_key_secrets PRIMARY KEY (id),
    CONSTRAINT fk_api_key_secrets_key_id_api_keys FOREIGN KEY(key_id) REFERENCES api_keys (id),
    CONSTRAINT uq_api_key_secrets_mac UNIQUE (mac)
);
CREATE INDEX ix_api_key_secrets_key_id ON api_key_secrets (key_id);

CREATE TABLE users (
    id UUID NOT NULL,
    email VARCHAR(254) NOT NULL,
    password_hash TEXT NOT NULL,
    platform_role VARCHAR(16) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    disabled_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_users PRIMARY KEY (id),
    CONSTRAINT ck_users_platform_role CHECK (platform_role in ('admin', 'viewer')),
    CONSTRAINT ck_users_email_lower CHECK (email = lower(email)),
    CONSTRAINT uq_users_email UNIQUE (email)
);

CREATE TABLE sessions (
    id UUID NOT NULL,
    user_id UUID NOT NULL,
    token_mac BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    revoked_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_sessions PRIMARY KEY (id),
    CONSTRAINT fk_sessions_user_id_users FOREIGN KEY(user_id) REFERENCES users (id),
    CONSTRAINT uq_sessions_token_mac UNIQUE (token_mac)
);
CREATE INDEX ix_sessions_user_id ON sessions (user_id);

CREATE TABLE login_throttle (
    subject VARCHAR(300) NOT NULL,
    window_start TIMESTAMP WITH TIME ZONE NOT NULL,
    failures INTEGER NOT NULL,
    CONSTRAINT pk_login_throttle PRIMARY KEY (subject)
);

-- Base models, adapters, deployments

CREATE TABLE base_models (
    id UUID NOT NULL,
    name VARCHAR(128) NOT NULL,
    revision VARCHAR(80) NOT NULL,
    tokenizer_sha256 VARCHAR(64) NOT NULL,
    chat_template_sha256 VARCHAR(64) NOT NULL,
    license VARCHAR(80),
    architecture JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_base_models PRIMARY KEY (id),
    CONSTRAINT uq_base_models_name_revision UNIQUE (name, revision)
);

CREATE TABLE adapters (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    base_model_id UUID NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_adapters PRIMARY KEY (id),
    CONSTRAINT uq_adapters_tenant_id_name UNIQUE (tenant_id, name),
    CONSTRAINT uq_adapters_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_adapters_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_adapters_base_model_id_base_models FOREIGN KEY(base_model_id) REFERENCES base_models (id)
);

CREATE TABLE adapter_versions (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    adapter_id UUID NOT NULL,
    version INTEGER NOT NULL,
    digest VARCHAR(71) NOT NULL,
    status VARCHAR(16) NOT NULL,
    size_bytes BIGINT NOT NULL,
    rank INTEGER NOT NULL,
    target_modules VARCHAR(64)[] NOT NULL,
    report JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_adapter_versions PRIMARY KEY (id),
    CONSTRAINT fk_adapter_versions_tenant_id_adapter_id_adapters FOREIGN KEY(tenant_id, adapter_id) REFERENCES adapters (tenant_id, id),
    CONSTRAINT uq_adapter_versions_adapter_id_version UNIQUE (adapter_id, version),
    CONSTRAINT uq_adapter_versions_adapter_id_digest UNIQUE (adapter_id, digest),
    CONSTRAINT uq_adapter_versions_tenant_id_id_digest UNIQUE (tenant_id, id, digest),
    CONSTRAINT ck_adapter_versions_status CHECK (status in ('ready', 'retired')),
    CONSTRAINT ck_adapter_versions_digest CHECK (digest ~ '^sha256:[0-9a-f]{64}$')
);
CREATE INDEX ix_adapter_versions_digest ON adapter_versions (digest);

CREATE TABLE deployments (
    id UUID NOT NULL,
    tenant_id UUID,
    public_name VARCHAR(128) NOT NULL,
    base_model_id UUID NOT NULL,
    current_revision_id UUID,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    archived_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_deployments PRIMARY KEY (id),
    CONSTRAINT uq_deployments_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_deployments_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_deployments_base_model_id_base_models FOREIGN KEY(base_model_id) REFERENCES base_models (id)
);
CREATE UNIQUE INDEX uq_deployments_platform_public_name ON deployments (public_name) WHERE tenant_id is null and archived_at is null;
CREATE UNIQUE INDEX uq_deployments_tenant_id_public_name ON deployments (tenant_id, public_name) WHERE archived_at is null;

CREATE TABLE deployment_revisions (
    id UUID NOT NULL,
    deployment_id UUID NOT NULL,
    tenant_id UUID,
    number INTEGER NOT NULL,
    base_model_id UUID NOT NULL,
    adapter_version_id UUID,
    adapter_digest VARCHAR(71),
    params JSONB NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_deployment_revisions PRIMARY KEY (id),
    CONSTRAINT uq_deployment_revisions_deployment_id_number UNIQUE (deployment_id, number),
    CONSTRAINT uq_deployment_revisions_deployment_id_id UNIQUE (deployment_id, id),
    CONSTRAINT fk_deployment_revisions_own_adapter FOREIGN KEY(tenant_id, adapter_version_id, adapter_digest) REFERENCES adapter_versions (tenant_id, id, digest),
    CONSTRAINT fk_deployment_revisions_own_deployment FOREIGN KEY(tenant_id, deployment_id) REFERENCES deployments (tenant_id, id),
    CONSTRAINT fk_deployment_revisions_deployment_id_deployments FOREIGN KEY(deployment_id) REFERENCES deployments (id),
    CONSTRAINT fk_deployment_revisions_base_model_id_base_models FOREIGN KEY(base_model_id) REFERENCES base_models (id),
    CONSTRAINT ck_deployment_revisions_adapter_has_tenant CHECK (adapter_version_id is null or tenant_id is not null),
    CONSTRAINT ck_deployment_revisions_adapter_has_digest CHECK ((adapter_version_id is null) = (adapter_digest is null))
);

-- The two tables name each other; the first revision is inserted before it is made current.
ALTER TABLE deployments ADD CONSTRAINT fk_deployments_own_revision
    FOREIGN KEY (id, current_revision_id) REFERENCES deployment_revisions (deployment_id, id);

-- Prices

CREATE TABLE price_books (
    id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    currency VARCHAR(3) DEFAULT 'USD' NOT NULL,
    status VARCHAR(16) NOT NULL,
    effective_from TIMESTAMP WITH TIME ZONE NOT NULL,
    effective_to TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_price_books PRIMARY KEY (id),
    CONSTRAINT ck_price_books_status CHECK (status in ('draft', 'published', 'retired'))
);

CREATE TABLE price_items (
    price_book_id UUID NOT NULL,
    target_kind VARCHAR(16) NOT NULL,
    token_class VARCHAR(16) NOT NULL,
    micro_usd_per_mtok BIGINT NOT NULL,
    CONSTRAINT pk_price_items PRIMARY KEY (price_book_id, target_kind, token_class),
    CONSTRAINT ck_price_items_target_kind CHECK (target_kind in ('base', 'adapter')),
    CONSTRAINT ck_price_items_token_class CHECK (token_class in ('input', 'cached_input', 'output')),
    CONSTRAINT ck_price_items_not_negative CHECK (micro_usd_per_mtok >= 0),
    CONSTRAINT fk_price_items_price_book_id_price_books FOREIGN KEY(price_book_id) REFERENCES price_books (id)
);

-- Requests, attempts, ledger

CREATE TABLE requests (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    key_id UUID,
    deployment_id UUID,
    revision_id UUID,
    adapter_version_id UUID,
    price_book_id UUID NOT NULL,
    kind VARCHAR(16) DEFAULT 'user' NOT NULL,
    state VARCHAR(16) DEFAULT 'reserved' NOT NULL,
    endpoint VARCHAR(32) NOT NULL,
    model VARCHAR(128) NOT NULL,
    is_stream BOOLEAN NOT NULL,
    has_stop_strings BOOLEAN DEFAULT false NOT NULL,
    owner VARCHAR(64) NOT NULL,
    replica_id VARCHAR(64),
    attempt INTEGER DEFAULT 1 NOT NULL,
    lease_token BIGINT DEFAULT 1 NOT NULL,
    lease_until TIMESTAMP WITH TIME ZONE NOT NULL,
    admitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    settled_at TIMESTAMP WITH TIME ZONE,
    est_prompt_tokens BIGINT NOT NULL,
    est_completion_tokens BIGINT NOT NULL,
    est_pico NUMERIC(30, 0) NOT NULL,
    checkpoint_tokens BIGINT DEFAULT 0 NOT NULL,
    prompt_tokens BIGINT,
    cached_tokens BIGINT,
    completion_tokens BIGINT,
    finish_reason VARCHAR(16),
    http_status INTEGER,
    error_code VARCHAR(64),
    ttft_ms INTEGER,
    e2e_ms INTEGER,
    settled_by VARCHAR(64),
    CONSTRAINT pk_requests PRIMARY KEY (id),
    CONSTRAINT ck_requests_state CHECK (state in ('reserved', 'settled', 'voided')),
    CONSTRAINT ck_requests_kind CHECK (kind in ('user', 'probe')),
    CONSTRAINT ck_requests_settled_at CHECK ((state = 'reserved') = (settled_at is null))
) PARTITION BY RANGE (id);
CREATE INDEX ix_requests_key_id_id ON requests (key_id, id);
CREATE INDEX ix_requests_lease_until ON requests (lease_until) WHERE state = 'reserved';
CREATE INDEX ix_requests_tenant_id_id ON requests (tenant_id, id);

CREATE TABLE attempts (
    request_id UUID NOT NULL,
    attempt INTEGER NOT NULL,
    tenant_id UUID NOT NULL,
    replica_id VARCHAR(64),
    outcome VARCHAR(16) NOT NULL,
    source VARCHAR(16) NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    generated BIGINT NOT NULL,
    billed BIGINT NOT NULL,
    absorbed BIGINT NOT NULL,
    discarded_past_stop BIGINT NOT NULL,
    discarded_past_abort BIGINT NOT NULL,
    recorded_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_attempts PRIMARY KEY (request_id, attempt),
    CONSTRAINT ck_attempts_outcome CHECK (outcome in ('completed', 'aborted', 'fault', 'lost')),
    CONSTRAINT ck_attempts_source CHECK (source in ('terminal', 'journal', 'observed')),
    CONSTRAINT ck_attempts_identity CHECK (generated = billed + absorbed + discarded_past_stop + discarded_past_abort),
    CONSTRAINT ck_attempts_not_negative CHECK (least(generated, billed, absorbed, discarded_past_stop, discarded_past_abort) >= 0),
    CONSTRAINT ck_attempts_cached_tokens CHECK (cached_tokens between 0 and prompt_tokens)
);

CREATE TABLE ledger (
    entry_id UUID NOT NULL,
    kind VARCHAR(16) NOT NULL,
    seq SMALLINT DEFAULT 0 NOT NULL,
    tenant_id UUID NOT NULL,
    account VARCHAR(16) NOT NULL,
    key_id UUID,
    deployment_id UUID,
    adapter_version_id UUID,
    price_book_id UUID NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    amount_pico NUMERIC(30, 0) NOT NULL,
    occurred_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_ledger PRIMARY KEY (entry_id, kind, seq),
    CONSTRAINT ck_ledger_kind CHECK (kind in ('usage', 'late', 'credit', 'debit', 'reversal')),
    CONSTRAINT ck_ledger_account CHECK (account in ('revenue', 'absorbed', 'credit', 'adjust'))
) PARTITION BY RANGE (entry_id);
CREATE INDEX ix_ledger_tenant_id_entry_id ON ledger (tenant_id, entry_id);

-- Fleet and the engines' own account

CREATE TABLE replicas (
    replica_id VARCHAR(64) NOT NULL,
    record JSONB NOT NULL,
    first_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    last_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_replicas PRIMARY KEY (replica_id)
);

CREATE TABLE gateways (
    gateway_id VARCHAR(64) NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_seen_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_gateways PRIMARY KEY (gateway_id)
);

CREATE TABLE engine_usage (
    request_id UUID NOT NULL,
    attempt INTEGER NOT NULL,
    replica_id VARCHAR(64) NOT NULL,
    tenant_id UUID NOT NULL,
    adapter_digest VARCHAR(71),
    finish_reason VARCHAR(16) NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE NOT NULL,
    landed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_engine_usage PRIMARY KEY (request_id, attempt)
);

CREATE TABLE journal_cursors (
    replica_id VARCHAR(64) NOT NULL,
    journal_id VARCHAR(64) NOT NULL,
    last_seq BIGINT NOT NULL,
    CONSTRAINT pk_journal_cursors PRIMARY KEY (replica_id, journal_id)
);

-- Audit and idempotency

CREATE TABLE audit_log (
    id UUID NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    actor_kind VARCHAR(16) NOT NULL,
    actor_id VARCHAR(64),
    request_id VARCHAR(64),
    action VARCHAR(64) NOT NULL,
    object_kind VARCHAR(32) NOT NULL,
    object_id VARCHAR(64),
    tenant_id UUID,
    detail JSONB NOT NULL,
    CONSTRAINT pk_audit_log PRIMARY KEY (id)
);
CREATE INDEX ix_audit_log_tenant_id_id ON audit_log (tenant_id, id);

CREATE TABLE idempotency (
    principal VARCHAR(80) NOT NULL,
    route VARCHAR(160) NOT NULL,
    key_hash BYTEA NOT NULL,
    fingerprint BYTEA NOT NULL,
    claim_token UUID NOT NULL,
    status INTEGER,
    response JSONB,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_idempotency PRIMARY KEY (principal, route, key_hash)
);
"""

# `requests` and `ledger` are partitioned by month of their UUIDv7 key: 48 bits of Unix milliseconds,
# so a month is the range from the id of its first millisecond to that of the next month's.
# A row outside every month lands in the default partition and moves when its month is made.
PARTITIONS = """
CREATE TABLE requests_default PARTITION OF requests DEFAULT;
CREATE TABLE ledger_default PARTITION OF ledger DEFAULT;

CREATE FUNCTION loraplex_uuid7_floor(at timestamptz) RETURNS uuid
    LANGUAGE sql STABLE STRICT
    AS $$
        SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0')
                || repeat('0', 20))::uuid
    $$;

CREATE FUNCTION loraplex_make_partitions(months_ahead integer) RETURNS integer
    LANGUAGE plpgsql
    -- The runtime role owns nothing, so it makes partitions with the owner's rights.
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
        FOREACH parent IN ARRAY ARRAY['requests', 'ledger'] LOOP
            key_column := CASE parent WHEN 'requests' THEN 'id' ELSE 'entry_id' END;
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

# The role that every serving process switches to: not the owner, no login, and only what it needs.
# What is append-only for everyone (money, usage, audit) it can read and add to, nothing else.
ROLE = """
DO $$
BEGIN
    -- Roles belong to the server: another database of ours, or an administrator, may have made it.
    IF to_regrole('loraplex_app') IS NULL THEN
        CREATE ROLE loraplex_app NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;  -- by someone else, just now
END
$$;
DO $$
BEGIN
    -- So that serving processes, which log in as we do, may switch to it. A superuser may anyway.
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('GRANT loraplex_app TO %I', current_user);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;  -- an administrator made the role, and says who is in it
END
$$;
GRANT USAGE ON SCHEMA @@SCHEMA@@ TO loraplex_app;

GRANT SELECT, INSERT ON
    attempts, ledger, engine_usage, audit_log, deployment_revisions, base_models
    TO loraplex_app;
GRANT SELECT, INSERT, UPDATE ON
    tenants, api_keys, api_key_secrets, users, adapters, deployments, requests, journal_cursors
    TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON
    sessions, login_throttle, idempotency, replicas, gateways
    TO loraplex_app;
GRANT SELECT, INSERT, UPDATE (status) ON adapter_versions TO loraplex_app;
GRANT SELECT ON price_books, price_items, alembic_version TO loraplex_app;
REVOKE EXECUTE ON FUNCTION loraplex_make_partitions(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_make_partitions(integer) TO loraplex_app;
"""

# Micro-USD per 1M tokens: 20_000 is 0.02 USD. Without a price nothing can be served.
PRICES = """
INSERT INTO price_books (id, name, currency, status, effective_from)
VALUES ('00000000-0000-7000-8000-000000000001', 'standard', 'USD', 'published',
        '2020-01-01T00:00:00Z');
INSERT INTO price_items (price_book_id, target_kind, token_class, micro_usd_per_mtok) VALUES
    ('00000000-0000-7000-8000-000000000001', 'base', 'input', 20000),
    ('00000000-0000-7000-8000-000000000001', 'base', 'cached_input', 10000),
    ('00000000-0000-7000-8000-000000000001', 'base', 'output', 40000),
    ('00000000-0000-7000-8000-000000000001', 'adapter', 'input', 30000),
    ('00000000-0000-7000-8000-000000000001', 'adapter', 'cached_input', 15000),
    ('00000000-0000-7000-8000-000000000001', 'adapter', 'output', 60000);
"""

# The role stays: other databases of this server may use it.
DROP = """
REVOKE ALL ON alembic_version FROM loraplex_app;
DROP FUNCTION loraplex_make_partitions(integer);
DROP FUNCTION loraplex_uuid7_floor(timestamptz);
ALTER TABLE deployments DROP CONSTRAINT fk_deployments_own_revision;
DROP TABLE idempotency, audit_log, journal_cursors, engine_usage, gateways, replicas, ledger,
    attempts, requests, price_items, price_books, deployment_revisions, deployments,
    adapter_versions, adapters, base_models, login_throttle, sessions, users, api_key_secrets,
    api_keys, tenants;
REVOKE USAGE ON SCHEMA @@SCHEMA@@ FROM loraplex_app;
"""


def upgrade() -> None:
    run_sql(TABLES, PARTITIONS, ROLE, PRICES)


def downgrade() -> None:
    run_sql(DROP)
