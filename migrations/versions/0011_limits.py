"""Adapter-hours, from deployments' history to the ledger; a version of the limits that tenants share; what
a tenant may take of an engine's memory.

Revision: 0011, after 0010.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# A change of such a limit would be news of every tenant, of which there may be very many: so it has a
# version of its own, which admissions compare as well.
SHARED_VERSION = """
CREATE TABLE shared_limits_version (
    is_only BOOLEAN DEFAULT true NOT NULL,
    version BIGINT DEFAULT 1 NOT NULL,
    CONSTRAINT pk_shared_limits_version PRIMARY KEY (is_only),
    CONSTRAINT ck_shared_limits_version_is_only CHECK (is_only)
);
GRANT SELECT ON shared_limits_version TO loraplex_app, loraplex_tenant;

CREATE OR REPLACE FUNCTION loraplex_bump_limits() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        owner uuid := CASE WHEN TG_OP = 'DELETE' THEN OLD.tenant_id ELSE NEW.tenant_id END;
        newest bigint;
    BEGIN
        IF owner IS NOT NULL THEN
            UPDATE tenants SET limits_version = limits_version + 1 WHERE id = owner;
            RETURN NULL;
        END IF;
        -- No row is version 1: nothing has been changed yet.
        INSERT INTO shared_limits_version AS s (version) VALUES (2)
        ON CONFLICT (is_only) DO UPDATE SET version = s.version + 1
        RETURNING s.version INTO newest;
        INSERT INTO outbox (topic, dedupe_key, payload)
        VALUES ('version', 'shared_limits:' || newest, jsonb_build_object('limits_version', newest))
        ON CONFLICT DO NOTHING;
        RETURN NULL;
    END
    $$;
"""

DROP_SHARED_VERSION = """
CREATE OR REPLACE FUNCTION loraplex_bump_limits() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        owner uuid := CASE WHEN TG_OP = 'DELETE' THEN OLD.tenant_id ELSE NEW.tenant_id END;
    BEGIN
        UPDATE tenants SET limits_version = limits_version + 1 WHERE id = owner;
        RETURN NULL;
    END
    $$;
DROP TABLE shared_limits_version;
"""


# What every deployment pointed at, and from when on. By a trigger, so that no code can forget to. Times
# are those of the change, not of its transaction's begin, and never go back within a deployment.
HISTORY = """
CREATE TABLE deployment_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    tenant_id UUID NOT NULL,
    deployment_id UUID NOT NULL,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    adapter_version_id UUID,
    CONSTRAINT pk_deployment_events PRIMARY KEY (id),
    CONSTRAINT fk_deployment_events_tenant_id_deployment_id_deployments
        FOREIGN KEY(tenant_id, deployment_id) REFERENCES deployments (tenant_id, id)
);
CREATE INDEX ix_deployment_events_tenant_id_at ON deployment_events (tenant_id, at);
CREATE INDEX ix_deployment_events_deployment_id_at ON deployment_events (deployment_id, at);
SELECT loraplex_guard_tenant_table('deployment_events');
GRANT SELECT ON deployment_events TO loraplex_app;

CREATE FUNCTION loraplex_note_deployment() RETURNS trigger
    -- As the owner: nobody who serves may write this table but by changing a deployment.
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        points_at uuid := (SELECT r.adapter_version_id FROM deployment_revisions r
            WHERE r.id = NEW.current_revision_id AND NEW.archived_at IS NULL);
        last deployment_events;
    BEGIN
        SELECT * INTO last FROM deployment_events e WHERE e.deployment_id = NEW.id
            ORDER BY e.at DESC, e.id DESC LIMIT 1;
        IF points_at IS DISTINCT FROM last.adapter_version_id THEN
            INSERT INTO deployment_events (tenant_id, deployment_id, at, adapter_version_id)
            VALUES (NEW.tenant_id, NEW.id, greatest(clock_timestamp(), last.at), points_at);
        END IF;
        RETURN NULL;
    END
    $$;
CREATE TRIGGER tr_deployments_note AFTER INSERT OR UPDATE ON deployments
    FOR EACH ROW WHEN (NEW.tenant_id IS NOT NULL) EXECUTE FUNCTION loraplex_note_deployment();

-- Of what is deployed already, its revisions are the history.
INSERT INTO deployment_events (tenant_id, deployment_id, at, adapter_version_id)
SELECT tenant_id, deployment_id, at, adapter_version_id FROM (
    SELECT r.tenant_id, r.deployment_id, r.created_at AS at, r.number, r.adapter_version_id
    FROM deployment_revisions r WHERE r.tenant_id IS NOT NULL
    UNION ALL
    SELECT d.tenant_id, d.id, d.archived_at, 2147483647, NULL
    FROM deployments d WHERE d.tenant_id IS NOT NULL AND d.archived_at IS NOT NULL
) known ORDER BY at, number;
"""

# A line of the ledger for each version, day and book: the first, and corrections of it, under one id that
# is made of what they are for, so that none is ever booked twice.
HOURS = """
ALTER TABLE price_items DROP CONSTRAINT ck_price_items_price_class;
ALTER TABLE price_items
    ADD CONSTRAINT ck_price_items_price_class CHECK (
        price_class in ('input', 'cached_input', 'output', 'request', 'adapter_hour')),
    -- A version that is deployed under two names is deployed once: names have no price for it.
    ADD CONSTRAINT ck_price_items_adapter_hour CHECK (
        price_class <> 'adapter_hour' or target_kind in ('any_adapter', 'base_model', 'adapter'));

ALTER TABLE ledger
    DROP CONSTRAINT ck_ledger_kind,
    DROP CONSTRAINT ck_ledger_price_book,
    DROP CONSTRAINT ck_ledger_sign,
    ADD COLUMN day DATE,
    ADD COLUMN seconds BIGINT;
ALTER TABLE ledger
    ADD CONSTRAINT ck_ledger_kind CHECK (
        kind in ('usage', 'late', 'hours', 'credit', 'debit', 'reversal')),
    ADD CONSTRAINT ck_ledger_price_book CHECK (
        (kind in ('usage', 'late', 'hours')) = (price_book_id is not null)),
    ADD CONSTRAINT ck_ledger_sign CHECK (case kind
        when 'credit' then amount_pico < 0 and account = 'credit'
        when 'debit' then amount_pico > 0 and account = 'adjust'
        when 'reversal' then account in ('credit', 'adjust')
        when 'hours' then account = 'revenue'
        else account in ('revenue', 'absorbed') end),
    ADD CONSTRAINT ck_ledger_hours CHECK (
        (kind = 'hours') = (day is not null) and (kind = 'hours') = (seconds is not null)
        and (kind <> 'hours' or adapter_version_id is not null));
CREATE INDEX ix_ledger_hours ON ledger (tenant_id, day) WHERE kind = 'hours';

-- How far each tenant's days have been looked at once; the last ones are looked at again.
CREATE TABLE adapter_hours_progress (
    tenant_id UUID NOT NULL,
    booked_to DATE NOT NULL,
    CONSTRAINT pk_adapter_hours_progress PRIMARY KEY (tenant_id),
    CONSTRAINT fk_adapter_hours_progress_tenant_id_tenants
        FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
SELECT loraplex_guard_tenant_table('adapter_hours_progress');
GRANT SELECT, INSERT, UPDATE ON adapter_hours_progress TO loraplex_app;

-- amount / per, to the nearest whole number, of two the even one; numeric's own round goes away from
-- zero. For amounts of zero and above.
CREATE FUNCTION loraplex_half_even(amount numeric, per numeric) RETURNS numeric
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
        SELECT div(amount, per) + CASE sign(2 * mod(amount, per) - per)
            WHEN 1 THEN 1 WHEN 0 THEN mod(div(amount, per), 2) ELSE 0 END
    $$;

-- Pico-USD an hour, or null: the book has no price for it, and it costs nothing.
CREATE FUNCTION loraplex_hour_price(book uuid, base_model uuid, adapter uuid) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
        SELECT i.price_pico
        FROM (VALUES (1, 'adapter', adapter), (2, 'base_model', base_model),
            (3, 'any_adapter', uuid '00000000-0000-0000-0000-000000000000')) AS t (rank, kind, id)
        JOIN price_items i ON i.price_book_id = book AND i.target_kind = t.kind
            AND i.target_id = t.id AND i.price_class = 'adapter_hour'
        ORDER BY t.rank LIMIT 1
    $$;

-- When each version was deployed, between two times; under several names at once counts once.
CREATE FUNCTION loraplex_deployed(tenant uuid, first_at timestamptz, end_at timestamptz)
    RETURNS TABLE (adapter_version_id uuid, spans tstzmultirange)
    LANGUAGE sql STABLE
    AS $$
        SELECT e.adapter_version_id,
            range_agg(tstzrange(greatest(e.at, first_at), least(e.ends_at, end_at)))
        FROM (
            SELECT v.adapter_version_id, v.at,
                lead(v.at) OVER (PARTITION BY v.deployment_id ORDER BY v.at, v.id) AS ends_at
            FROM deployment_events v WHERE v.tenant_id = tenant AND v.at < end_at
        ) e
        WHERE e.adapter_version_id IS NOT NULL
            AND coalesce(e.ends_at, 'infinity') > greatest(e.at, first_at)
        GROUP BY e.adapter_version_id
    $$;

-- What a tenant's day comes to: whole seconds, by version and by the book in force, at its price.
CREATE FUNCTION loraplex_adapter_hours_of(tenant uuid, on_day date)
    RETURNS TABLE (adapter_version_id uuid, price_book_id uuid, seconds bigint, amount_pico numeric)
    LANGUAGE sql STABLE
    AS $$
        SELECT p.adapter_version_id, p.price_book_id, p.seconds,
            loraplex_half_even(p.seconds::numeric * price.pico, 3600)
        FROM (
            SELECT d.adapter_version_id, b.id AS price_book_id, (
                SELECT floor(sum(extract(epoch FROM upper(s)) - extract(epoch FROM lower(s))))::bigint
                FROM unnest(d.spans
                    * tstzmultirange(tstzrange(b.effective_from, b.effective_to))) AS s
            ) AS seconds
            FROM (
                SELECT loraplex_midnight(on_day, t.billing_tz) AS first_at,
                    loraplex_midnight(on_day + 1, t.billing_tz) AS end_at
                FROM tenants t WHERE t.id = tenant
            ) AS whole
            CROSS JOIN LATERAL loraplex_deployed(tenant, whole.first_at, whole.end_at) d
            JOIN price_books b ON b.status <> 'draft' AND b.effective_from < whole.end_at
                AND (b.effective_to IS NULL OR b.effective_to > whole.first_at)
        ) p
        JOIN adapter_versions v ON v.id = p.adapter_version_id
        JOIN adapters a ON a.id = v.adapter_id
        CROSS JOIN LATERAL (
            SELECT loraplex_hour_price(p.price_book_id, a.base_model_id, a.id) AS pico) price
        WHERE p.seconds > 0 AND price.pico IS NOT NULL
    $$;

-- Have the ledger say of a day that is over what its history comes to; how many lines that took. Done
-- again it takes none, or corrects what has changed.
CREATE FUNCTION loraplex_book_adapter_hours(tenant uuid, on_day date) RETURNS integer
    LANGUAGE plpgsql
    AS $$
    DECLARE
        zone text;
        prefix text;
        booked integer;
    BEGIN
        -- Its days stay what they are meanwhile, and one at a time books them.
        SELECT t.billing_tz INTO STRICT zone FROM tenants t WHERE t.id = tenant FOR SHARE;
        PERFORM pg_advisory_xact_lock(hashtextextended(tenant::text, 7158));
        IF clock_timestamp() < loraplex_midnight(on_day + 1, zone) THEN
            RETURN 0;
        END IF;
        prefix := left(replace(
            loraplex_uuid7_floor(loraplex_midnight(on_day, zone))::text, '-', ''), 12);
        INSERT INTO ledger (entry_id, kind, seq, tenant_id, account, adapter_version_id,
            price_book_id, prompt_tokens, cached_tokens, completion_tokens, amount_pico, day,
            seconds, occurred_at)
        SELECT (prefix || '7' || substr(named.hash, 1, 3) || '8' || substr(named.hash, 4, 15))::uuid,
            'hours', coalesce(b.next_seq, 0), tenant, 'revenue', version_id, book_id, 0, 0, 0,
            coalesce(h.amount_pico, 0) - coalesce(b.amount_pico, 0), on_day,
            coalesce(h.seconds, 0) - coalesce(b.seconds, 0), clock_timestamp()
        FROM (
            SELECT o.adapter_version_id AS version_id, o.price_book_id AS book_id, o.seconds,
                o.amount_pico
            FROM loraplex_adapter_hours_of(tenant, on_day) o
        ) h
        FULL JOIN (
            SELECT l.adapter_version_id AS version_id, l.price_book_id AS book_id,
                sum(l.seconds) AS seconds, sum(l.amount_pico) AS amount_pico,
                max(l.seq) + 1 AS next_seq
            FROM ledger l WHERE l.kind = 'hours' AND l.tenant_id = tenant AND l.day = on_day
            GROUP BY l.adapter_version_id, l.price_book_id
        ) b USING (version_id, book_id)
        CROSS JOIN LATERAL (
            SELECT md5(concat_ws(' ', tenant, version_id, book_id, on_day)) AS hash) named
        WHERE (coalesce(h.seconds, 0), coalesce(h.amount_pico, 0))
            <> (coalesce(b.seconds, 0), coalesce(b.amount_pico, 0));
        GET DIAGNOSTICS booked = ROW_COUNT;
        RETURN booked;
    END
    $$;

-- A line of hours is a sum of days that are rounded each.
ALTER TABLE invoice_lines DROP CONSTRAINT ck_invoice_lines_amount;
ALTER TABLE invoice_lines ADD CONSTRAINT ck_invoice_lines_amount CHECK (
    price_class = 'adapter_hour' or amount_pico = quantity * unit_price_pico);
"""

# Books that know hours lose that price; lines of the ledger that are hours go.
DROP_HOURS = """
ALTER TABLE invoice_lines DROP CONSTRAINT ck_invoice_lines_amount;
DROP FUNCTION loraplex_book_adapter_hours(uuid, date);
DROP FUNCTION loraplex_adapter_hours_of(uuid, date);
DROP FUNCTION loraplex_deployed(uuid, timestamptz, timestamptz);
DROP FUNCTION loraplex_hour_price(uuid, uuid, uuid);
DROP FUNCTION loraplex_half_even(numeric, numeric);
DROP TABLE adapter_hours_progress;
ALTER TABLE invoice_lines DISABLE TRIGGER tr_invoice_lines_guard;
DELETE FROM invoice_lines WHERE price_class = 'adapter_hour';
ALTER TABLE invoice_lines ENABLE TRIGGER tr_invoice_lines_guard;
ALTER TABLE invoice_lines ADD CONSTRAINT ck_invoice_lines_amount CHECK (
    amount_pico = quantity * unit_price_pico);
DELETE FROM ledger WHERE kind = 'hours';
DROP INDEX ix_ledger_hours;
ALTER TABLE ledger
    DROP CONSTRAINT ck_ledger_hours,
    DROP CONSTRAINT ck_ledger_kind,
    DROP CONSTRAINT ck_ledger_price_book,
    DROP CONSTRAINT ck_ledger_sign,
    DROP COLUMN day,
    DROP COLUMN seconds;
ALTER TABLE ledger
    ADD CONSTRAINT ck_ledger_kind CHECK (kind in ('usage', 'late', 'credit', 'debit', 'reversal')),
    ADD CONSTRAINT ck_ledger_price_book CHECK (
        (kind in ('usage', 'late')) = (price_book_id is not null)),
    ADD CONSTRAINT ck_ledger_sign CHECK (case kind
        when 'credit' then amount_pico < 0 and account = 'credit'
        when 'debit' then amount_pico > 0 and account = 'adjust'
        when 'reversal' then account in ('credit', 'adjust')
        else account in ('revenue', 'absorbed') end);
ALTER TABLE price_items DISABLE TRIGGER tr_price_items_guard;
DELETE FROM price_items WHERE price_class = 'adapter_hour';
ALTER TABLE price_items ENABLE TRIGGER tr_price_items_guard;
ALTER TABLE price_items
    DROP CONSTRAINT ck_price_items_adapter_hour,
    DROP CONSTRAINT ck_price_items_price_class;
ALTER TABLE price_items ADD CONSTRAINT ck_price_items_price_class CHECK (
    price_class in ('input', 'cached_input', 'output', 'request'));
DROP TRIGGER tr_deployments_note ON deployments;
DROP FUNCTION loraplex_note_deployment();
DROP TABLE deployment_events;
"""


MEMORY = """
ALTER TABLE tenants
    ADD COLUMN memory_weight DOUBLE PRECISION,
    ADD COLUMN max_adapters INTEGER,
    ADD CONSTRAINT ck_tenants_memory_weight CHECK (memory_weight between 0.001 and 1000),
    ADD CONSTRAINT ck_tenants_max_adapters CHECK (max_adapters >= 1);
"""

DROP_MEMORY = """
ALTER TABLE tenants DROP COLUMN memory_weight, DROP COLUMN max_adapters;
"""


def upgrade() -> None:
    run_sql(SHARED_VERSION, HISTORY, HOURS, MEMORY)


def downgrade() -> None:
    run_sql(DROP_MEMORY, DROP_HOURS, DROP_SHARED_VERSION)
