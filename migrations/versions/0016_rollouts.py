"""Engine builds, aliases, pins, rollouts, adapters to keep resident; what requests and the books say of them.

Revision: 0016, after 0015.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import Edit, edit_function, reverted, run_sql

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

BEFORE = """
ALTER TABLE adapter_versions
    ADD CONSTRAINT uq_adapter_versions_adapter_id_id UNIQUE (adapter_id, id);
"""

TABLES = """
CREATE TABLE engine_builds (
    id UUID NOT NULL,
    fingerprint VARCHAR(128) NOT NULL,
    base_model_id UUID,
    base_model VARCHAR(128) NOT NULL,
    facts JSONB NOT NULL,
    first_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    last_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_engine_builds PRIMARY KEY (id),
    CONSTRAINT uq_engine_builds_fingerprint UNIQUE (fingerprint),
    CONSTRAINT fk_engine_builds_base_model_id_base_models FOREIGN KEY(base_model_id) REFERENCES base_models (id)
);

CREATE TABLE adapter_aliases (
    adapter_id UUID NOT NULL,
    alias VARCHAR(64) NOT NULL,
    tenant_id UUID NOT NULL,
    version_id UUID NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_adapter_aliases PRIMARY KEY (adapter_id, alias),
    CONSTRAINT fk_adapter_aliases_tenant_id_adapter_id_adapters FOREIGN KEY(tenant_id, adapter_id) REFERENCES adapters (tenant_id, id),
    CONSTRAINT fk_adapter_aliases_own_version FOREIGN KEY(adapter_id, version_id) REFERENCES adapter_versions (adapter_id, id),
    CONSTRAINT uq_adapter_aliases_tenant_id_adapter_id_alias UNIQUE (tenant_id, adapter_id, alias)
);

CREATE TABLE adapter_alias_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    tenant_id UUID NOT NULL,
    adapter_id UUID NOT NULL,
    alias VARCHAR(64) NOT NULL,
    version_id UUID,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_adapter_alias_events PRIMARY KEY (id),
    CONSTRAINT fk_adapter_alias_events_tenant_id_adapter_id_adapters FOREIGN KEY(tenant_id, adapter_id) REFERENCES adapters (tenant_id, id)
);
CREATE INDEX ix_adapter_alias_events_adapter_id_id ON adapter_alias_events (adapter_id, id);

CREATE TABLE pins (
    tenant_id UUID NOT NULL,
    deployment_id UUID NOT NULL,
    revision_id UUID NOT NULL,
    until TIMESTAMP WITH TIME ZONE,
    reason VARCHAR(500) NOT NULL,
    created_by VARCHAR(200) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    warned_at TIMESTAMP WITH TIME ZONE,
    expired_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_pins PRIMARY KEY (tenant_id, deployment_id),
    CONSTRAINT fk_pins_own_revision FOREIGN KEY(deployment_id, revision_id) REFERENCES deployment_revisions (deployment_id, id),
    CONSTRAINT fk_pins_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_pins_deployment_id_deployments FOREIGN KEY(deployment_id) REFERENCES deployments (id)
);
CREATE INDEX ix_pins_until ON pins (until) WHERE expired_at is null;

CREATE TABLE pin_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    tenant_id UUID NOT NULL,
    deployment_id UUID NOT NULL,
    revision_id UUID,
    until TIMESTAMP WITH TIME ZONE,
    reason VARCHAR(500),
    created_by VARCHAR(200),
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_pin_events PRIMARY KEY (id),
    CONSTRAINT fk_pin_events_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_pin_events_deployment_id_deployments FOREIGN KEY(deployment_id) REFERENCES deployments (id)
);
CREATE INDEX ix_pin_events_tenant_id_deployment_id_at ON pin_events (tenant_id, deployment_id, at);

CREATE TABLE rollouts (
    id UUID NOT NULL,
    tenant_id UUID,
    deployment_id UUID NOT NULL,
    stable_revision_id UUID NOT NULL,
    canary_revision_id UUID NOT NULL,
    state VARCHAR(16) DEFAULT 'draft' NOT NULL,
    is_paused BOOLEAN DEFAULT false NOT NULL,
    step SMALLINT DEFAULT 0 NOT NULL,
    step_began_at TIMESTAMP WITH TIME ZONE,
    steps JSONB NOT NULL,
    sticky_by VARCHAR(16) NOT NULL,
    salt BYTEA NOT NULL,
    weight_bp INTEGER DEFAULT 0 NOT NULL,
    shadow_bp INTEGER DEFAULT 0 NOT NULL,
    score_bp INTEGER DEFAULT 0 NOT NULL,
    gate JSONB NOT NULL,
    changes VARCHAR(64)[] NOT NULL,
    verdict JSONB,
    looked_at TIMESTAMP WITH TIME ZONE,
    created_by VARCHAR(200) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    end_reason VARCHAR(1000),
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_rollouts PRIMARY KEY (id),
    CONSTRAINT ck_rollouts_state CHECK (state in ('draft', 'evaluating', 'shadow', 'canary', 'promoted', 'aborted', 'rolled_back')),
    CONSTRAINT ck_rollouts_sticky_by CHECK (sticky_by in ('tenant', 'key', 'user', 'conversation')),
    CONSTRAINT ck_rollouts_shares CHECK (weight_bp between 0 and 10000 and shadow_bp between 0 and 10000 and score_bp between 0 and 10000),
    CONSTRAINT ck_rollouts_weight_in_canary CHECK (weight_bp = 0 or state = 'canary'),
    CONSTRAINT ck_rollouts_shadow_in_shadow CHECK (shadow_bp = 0 or state = 'shadow'),
    CONSTRAINT ck_rollouts_ended_at CHECK ((state in ('promoted', 'aborted', 'rolled_back')) = (ended_at is not null)),
    CONSTRAINT ck_rollouts_two_revisions CHECK (stable_revision_id <> canary_revision_id),
    CONSTRAINT fk_rollouts_own_stable FOREIGN KEY(deployment_id, stable_revision_id) REFERENCES deployment_revisions (deployment_id, id),
    CONSTRAINT fk_rollouts_own_canary FOREIGN KEY(deployment_id, canary_revision_id) REFERENCES deployment_revisions (deployment_id, id),
    CONSTRAINT fk_rollouts_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_rollouts_deployment_id_deployments FOREIGN KEY(deployment_id) REFERENCES deployments (id)
);
CREATE INDEX ix_rollouts_deployment_id_id ON rollouts (deployment_id, id);
CREATE INDEX ix_rollouts_tenant_id_id ON rollouts (tenant_id, id);
CREATE UNIQUE INDEX uq_rollouts_active ON rollouts (deployment_id) WHERE state in ('evaluating', 'shadow', 'canary');

CREATE TABLE rollout_events (
    rollout_id UUID NOT NULL,
    seq INTEGER NOT NULL,
    tenant_id UUID,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    kind VARCHAR(32) NOT NULL,
    actor VARCHAR(200) NOT NULL,
    message VARCHAR(1000) NOT NULL,
    detail JSONB NOT NULL,
    CONSTRAINT pk_rollout_events PRIMARY KEY (rollout_id, seq),
    CONSTRAINT fk_rollout_events_rollout_id_rollouts FOREIGN KEY(rollout_id) REFERENCES rollouts (id) ON DELETE CASCADE
);

CREATE TABLE resident_adapters (
    tenant_id UUID NOT NULL,
    version_id UUID NOT NULL,
    digest VARCHAR(71) NOT NULL,
    reason VARCHAR(500) NOT NULL,
    created_by VARCHAR(200) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_resident_adapters PRIMARY KEY (tenant_id, version_id),
    CONSTRAINT fk_resident_adapters_own_version FOREIGN KEY(tenant_id, version_id, digest) REFERENCES adapter_versions (tenant_id, id, digest)
);
CREATE INDEX ix_resident_adapters_digest ON resident_adapters (digest);
"""

COLUMNS = """
ALTER TABLE deployments
    ADD COLUMN followed_adapter_id UUID,
    ADD COLUMN followed_alias VARCHAR(64),
    ADD COLUMN row_version INTEGER DEFAULT 1 NOT NULL,
    ADD CONSTRAINT fk_deployments_own_alias FOREIGN KEY (tenant_id, followed_adapter_id, followed_alias)
        REFERENCES adapter_aliases (tenant_id, adapter_id, alias),
    ADD CONSTRAINT ck_deployments_followed_alias CHECK (
        (followed_adapter_id is null) = (followed_alias is null)
        and (followed_alias is null or tenant_id is not null));
CREATE INDEX ix_deployments_followed ON deployments (followed_adapter_id, followed_alias)
    WHERE followed_alias is not null;
ALTER TABLE deployment_revisions
    ADD COLUMN engine_build_id UUID,
    ADD COLUMN price_book_id UUID,
    ADD CONSTRAINT fk_deployment_revisions_engine_build_id_engine_builds
        FOREIGN KEY (engine_build_id) REFERENCES engine_builds (id),
    ADD CONSTRAINT fk_deployment_revisions_price_book_id_price_books
        FOREIGN KEY (price_book_id) REFERENCES price_books (id);
ALTER TABLE requests
    ADD COLUMN rollout_id UUID,
    ADD COLUMN rollout_step SMALLINT,
    ADD COLUMN arm VARCHAR(8),
    ADD COLUMN subject_key BIGINT,
    ADD COLUMN shadow_of UUID,
    ADD COLUMN sampling JSONB,
    ADD COLUMN fingerprint VARCHAR(128),
    ADD COLUMN itl_mean_ms REAL,
    ADD COLUMN itl_p95_ms REAL,
    ADD COLUMN stable_logprob REAL,
    DROP CONSTRAINT ck_requests_kind,
    ADD CONSTRAINT ck_requests_kind CHECK (kind in ('user', 'probe', 'shadow')) NOT VALID,
    ADD CONSTRAINT ck_requests_arm CHECK (arm in ('stable', 'canary', 'shadow', 'pinned')) NOT VALID;
CREATE INDEX ix_requests_rollout_id ON requests (rollout_id, rollout_step, arm, subject_key)
    WHERE rollout_id is not null;
ALTER TABLE ledger ADD COLUMN revision_id UUID;
"""

ALIAS_EVENTS = """
-- As of deployments' history: by a trigger, so that no way past it exists.
CREATE FUNCTION loraplex_note_alias() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            INSERT INTO adapter_alias_events (tenant_id, adapter_id, alias, version_id)
            VALUES (OLD.tenant_id, OLD.adapter_id, OLD.alias, NULL);
        ELSIF TG_OP = 'INSERT' OR NEW.version_id <> OLD.version_id THEN
            INSERT INTO adapter_alias_events (tenant_id, adapter_id, alias, version_id)
            VALUES (NEW.tenant_id, NEW.adapter_id, NEW.alias, NEW.version_id);
        END IF;
        RETURN NULL;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_note_alias() FROM PUBLIC;
CREATE TRIGGER tr_adapter_aliases_note AFTER INSERT OR UPDATE OR DELETE ON adapter_aliases
    FOR EACH ROW EXECUTE FUNCTION loraplex_note_alias();
"""

PIN_EVENTS = """
-- A request says that a pin chose its revision; who asks a year later finds here which pin that was.
CREATE FUNCTION loraplex_note_pin() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            INSERT INTO pin_events (tenant_id, deployment_id) VALUES (OLD.tenant_id, OLD.deployment_id);
        ELSIF TG_OP = 'INSERT' OR (NEW.revision_id, NEW.until, NEW.reason, NEW.created_by)
                IS DISTINCT FROM (OLD.revision_id, OLD.until, OLD.reason, OLD.created_by) THEN
            INSERT INTO pin_events (tenant_id, deployment_id, revision_id, until, reason, created_by)
            VALUES (NEW.tenant_id, NEW.deployment_id, NEW.revision_id, NEW.until, NEW.reason,
                NEW.created_by);
        END IF;
        RETURN NULL;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_note_pin() FROM PUBLIC;
CREATE TRIGGER tr_pins_note AFTER INSERT OR UPDATE OR DELETE ON pins
    FOR EACH ROW EXECUTE FUNCTION loraplex_note_pin();
"""

BOOKS = """
-- A draft's prices change: what is billed by a book must be billed so for ever.
CREATE FUNCTION loraplex_guard_revision_book() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        IF EXISTS (SELECT FROM price_books b
                WHERE b.id = NEW.price_book_id AND b.status = 'draft') THEN
            RAISE check_violation USING MESSAGE = 'a revision is billed by a published price book';
        END IF;
        RETURN NEW;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_guard_revision_book() FROM PUBLIC;
CREATE TRIGGER tr_deployment_revisions_guard_book
    BEFORE INSERT OR UPDATE OF price_book_id ON deployment_revisions
    FOR EACH ROW WHEN (NEW.price_book_id IS NOT NULL)
    EXECUTE FUNCTION loraplex_guard_revision_book();

-- Prices of the ledger's rows are looked up by their deployment, also years later.
CREATE FUNCTION loraplex_guard_deployment_base() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE check_violation USING MESSAGE = 'a deployment stays with the base model that it is priced by';
    END
    $$;
CREATE TRIGGER tr_deployments_guard_base BEFORE UPDATE OF base_model_id ON deployments
    FOR EACH ROW WHEN (NEW.base_model_id IS DISTINCT FROM OLD.base_model_id)
    EXECUTE FUNCTION loraplex_guard_deployment_base();

-- The book by which a request is billed, its name and its prices; nothing for a request that one may not
-- see. As the owner: a tenant may know what it pays for its own, and no more of the books.
CREATE FUNCTION loraplex_prices_of_request(wanted uuid)
    RETURNS TABLE (price_book_id uuid, name varchar, input bigint, cached_input bigint,
        output bigint, request bigint)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
        SELECT b.id, b.name, p.input, p.cached_input, p.output, p.request
        FROM (
            SELECT r.tenant_id, r.price_book_id, r.adapter_version_id, r.deployment_id
            FROM requests r WHERE r.id = wanted
            UNION
            SELECT l.tenant_id, l.price_book_id, l.adapter_version_id, l.deployment_id
            FROM ledger l WHERE l.entry_id = wanted AND l.kind = 'usage'
        ) AS of_it
        JOIN price_books b ON b.id = of_it.price_book_id
        CROSS JOIN LATERAL loraplex_entry_prices(
            b.id, of_it.adapter_version_id, of_it.deployment_id) p
        WHERE current_setting('role') <> 'loraplex_tenant'
            OR of_it.tenant_id = ANY (loraplex_tenant_ids())
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_prices_of_request(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_prices_of_request(uuid) TO loraplex_app, loraplex_tenant;
"""

RIGHTS = """
GRANT SELECT, INSERT, UPDATE ON engine_builds TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON adapter_aliases, pins, rollouts, resident_adapters
    TO loraplex_app;
GRANT SELECT ON adapter_alias_events, pin_events TO loraplex_app;
GRANT SELECT, INSERT, DELETE ON rollout_events TO loraplex_app;

SELECT loraplex_guard_tenant_table('adapter_aliases');
SELECT loraplex_guard_tenant_table('adapter_alias_events');
SELECT loraplex_guard_tenant_table('pins');
SELECT loraplex_guard_tenant_table('pin_events');
SELECT loraplex_guard_tenant_table('rollouts');
SELECT loraplex_guard_tenant_table('rollout_events');
SELECT loraplex_guard_tenant_table('resident_adapters');

-- What runs is nobody's secret. The platform's own rollouts are: their salt tells whom they fall on, their
-- verdicts how all tenants fare.
GRANT SELECT ON engine_builds TO loraplex_tenant;

GRANT INSERT, UPDATE, DELETE ON adapter_aliases, pins TO loraplex_tenant;
GRANT INSERT, UPDATE ON rollouts TO loraplex_tenant;
GRANT INSERT ON rollout_events TO loraplex_tenant;
"""

RESERVE: tuple[Edit, ...] = (
    (
        "p_max_skew_s double precision, OUT",
        "p_max_skew_s double precision, p_rollout_id uuid, p_rollout_step integer, p_arm text,"
        " p_subject_key bigint, p_shadow_of uuid, p_sampling jsonb, OUT",
    ),
    ("(p_kind = 'probe' OR (k.status", "(p_kind <> 'user' OR (k.status"),
    (
        "price_book_id := loraplex_book_at(at);",
        "price_book_id := coalesce((SELECT v.price_book_id FROM deployment_revisions v\n"
        "            WHERE v.id = p_revision_id), loraplex_book_at(at));",
    ),
    (
        "-- A probe is the platform's own: no quota of the tenant's is asked or charged.",
        "-- Probes and shadows are the platform's own: no quota of the tenant's is asked or charged.",
    ),
    (
        "windows, asked_completion_tokens, clamped_by)",
        "windows, asked_completion_tokens, clamped_by,\n"
        "            rollout_id, rollout_step, arm, subject_key, shadow_of, sampling)",
    ),
    (
        "window_ids, p_max_tokens * p_num_choices, clamper)",
        "window_ids, p_max_tokens * p_num_choices, clamper,\n"
        "            p_rollout_id, p_rollout_step, p_arm, p_subject_key, p_shadow_of, p_sampling)",
    ),
)

BOOK: tuple[Edit, ...] = (
    (
        "num_choices bigint, made_at_s double precision, max_skew_s double precision)",
        "num_choices bigint, made_at_s double precision, max_skew_s double precision,\n"
        "                rollout_id uuid, rollout_step integer, arm text, subject_key bigint,\n"
        "                shadow_of uuid, sampling text)",
    ),
    (
        "i.num_choices, i.made_at_s, i.max_skew_s) r;",
        "i.num_choices, i.made_at_s, i.max_skew_s,\n"
        "            i.rollout_id, i.rollout_step, i.arm, i.subject_key, i.shadow_of, i.sampling::jsonb) r;",
    ),
)

SETTLE_ALL: tuple[Edit, ...] = (
    (
        "ttft_ms integer, e2e_ms integer)",
        "ttft_ms integer, e2e_ms integer, fingerprint text, itl_mean_ms real, itl_p95_ms real)",
    ),
    (
        "e2e_ms = c.e2e_ms\n",
        "e2e_ms = c.e2e_ms, fingerprint = c.fingerprint, itl_mean_ms = c.itl_mean_ms,\n"
        "                itl_p95_ms = c.itl_p95_ms\n",
    ),
    (
        "q.deployment_id, q.adapter_version_id, q.price_book_id, q.admitted_at,",
        "q.deployment_id, q.revision_id, q.adapter_version_id, q.price_book_id, q.admitted_at,",
    ),
    (
        "                deployment_id, adapter_version_id, price_book_id, prompt_tokens, cached_tokens,",
        "                deployment_id, revision_id, adapter_version_id, price_book_id, prompt_tokens,\n"
        "                cached_tokens,",
    ),
    (
        "                c.deployment_id, c.adapter_version_id, c.price_book_id, c.prompt_tokens,",
        "                c.deployment_id, c.revision_id, c.adapter_version_id, c.price_book_id, c.prompt_tokens,",
    ),
)

SETTLE: tuple[Edit, ...] = (
    (
        "p_e2e_ms integer, OUT",
        "p_e2e_ms integer, p_fingerprint text, p_itl_mean_ms real, p_itl_p95_ms real, OUT",
    ),
    (
        "'e2e_ms', p_e2e_ms)))",
        "'e2e_ms', p_e2e_ms, 'fingerprint', p_fingerprint,\n"
        "            'itl_mean_ms', p_itl_mean_ms, 'itl_p95_ms', p_itl_p95_ms)))",
    ),
)

CHARGE: tuple[Edit, ...] = (
    (
        "            deployment_id, adapter_version_id, price_book_id, prompt_tokens, cached_tokens,",
        "            deployment_id, revision_id, adapter_version_id, price_book_id, prompt_tokens,\n"
        "            cached_tokens,",
    ),
    (
        "            r.deployment_id, r.adapter_version_id, r.price_book_id, p_prompt,",
        "            r.deployment_id, r.revision_id, r.adapter_version_id, r.price_book_id, p_prompt,",
    ),
)

# What a tenant says of its models in its own words, and what would keep its adapters loaded. After the
# names of deployments, which an alias holds; and with the note of its own end that an alias leaves.
ERASE: tuple[Edit, ...] = (
    (
        "UPDATE deployments SET public_name = 'deleted-' || replace(id::text, '-', ''),\n",
        "UPDATE deployments SET public_name = 'deleted-' || replace(id::text, '-', ''),\n"
        "            followed_adapter_id = NULL, followed_alias = NULL,\n",
    ),
    (
        "        DELETE FROM webhooks WHERE tenant_id = wanted;\n",
        "        DELETE FROM resident_adapters WHERE tenant_id = wanted;\n"
        "        DELETE FROM pins WHERE tenant_id = wanted;\n"
        "        GET DIAGNOSTICS counted = ROW_COUNT;\n"
        "        done := done || jsonb_build_object('pins', counted);\n"
        "        DELETE FROM pin_events WHERE tenant_id = wanted;\n"
        "        DELETE FROM adapter_aliases WHERE tenant_id = wanted;\n"
        "        GET DIAGNOSTICS counted = ROW_COUNT;\n"
        "        done := done || jsonb_build_object('adapter_aliases', counted);\n"
        "        DELETE FROM adapter_alias_events WHERE tenant_id = wanted;\n"
        "        DELETE FROM outbox o USING rollouts r WHERE r.tenant_id = wanted\n"
        "            AND o.payload ->> 'rollout_id' = 'rol_' || replace(r.id::text, '-', '');\n"
        "        DELETE FROM rollout_events WHERE tenant_id = wanted;\n"
        "        DELETE FROM rollouts WHERE tenant_id = wanted;\n"
        "        GET DIAGNOSTICS counted = ROW_COUNT;\n"
        "        done := done || jsonb_build_object('rollouts', counted);\n"
        "\n"
        "        DELETE FROM webhooks WHERE tenant_id = wanted;\n",
    ),
)

FUNCTIONS: tuple[tuple[str, tuple[Edit, ...]], ...] = (
    ("loraplex_reserve", RESERVE),
    ("loraplex_book", BOOK),
    ("loraplex_settle_all", SETTLE_ALL),
    ("loraplex_settle", SETTLE),
    ("loraplex_charge", CHARGE),
    ("loraplex_erase_tenant", ERASE),
)

DROP = """
ALTER TABLE ledger DROP COLUMN revision_id;
DROP INDEX ix_requests_rollout_id;
ALTER TABLE requests DROP CONSTRAINT ck_requests_arm, DROP CONSTRAINT ck_requests_kind;
-- The books know nothing of kinds: what a shadow cost stays absorbed.
UPDATE requests SET kind = 'probe' WHERE kind = 'shadow';
ALTER TABLE requests
    ADD CONSTRAINT ck_requests_kind CHECK (kind in ('user', 'probe')),
    DROP COLUMN rollout_id, DROP COLUMN rollout_step, DROP COLUMN arm, DROP COLUMN subject_key,
    DROP COLUMN shadow_of, DROP COLUMN sampling, DROP COLUMN fingerprint, DROP COLUMN itl_mean_ms,
    DROP COLUMN itl_p95_ms, DROP COLUMN stable_logprob;
DROP FUNCTION loraplex_prices_of_request(uuid);
DROP TRIGGER tr_deployments_guard_base ON deployments;
DROP FUNCTION loraplex_guard_deployment_base();
DROP TRIGGER tr_deployment_revisions_guard_book ON deployment_revisions;
DROP FUNCTION loraplex_guard_revision_book();
ALTER TABLE deployment_revisions DROP COLUMN engine_build_id, DROP COLUMN price_book_id;
DROP INDEX ix_deployments_followed;
ALTER TABLE deployments
    DROP CONSTRAINT fk_deployments_own_alias,
    DROP COLUMN followed_adapter_id, DROP COLUMN followed_alias, DROP COLUMN row_version;
DROP TABLE resident_adapters, rollout_events, rollouts, pins, pin_events, adapter_alias_events,
    adapter_aliases, engine_builds;
DROP FUNCTION loraplex_note_alias();
DROP FUNCTION loraplex_note_pin();
ALTER TABLE adapter_versions DROP CONSTRAINT uq_adapter_versions_adapter_id_id;
"""


def upgrade() -> None:
    run_sql(BEFORE, TABLES, COLUMNS, ALIAS_EVENTS, PIN_EVENTS, BOOKS, RIGHTS)
    for name, edits in FUNCTIONS:
        edit_function(name, *edits)


def downgrade() -> None:
    for name, edits in reversed(FUNCTIONS):
        edit_function(name, *reverted(*edits))
    run_sql(DROP)
