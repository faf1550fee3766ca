"""Quotas are opened first and counted then; marks of rollups name what they stand for.

Revision: 0010, after 0009.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# Why a limit of its own and no state of the window: whoever reserves, counts for every limit that there
# is, hard or soft, and so for this one; being soft and without alerts, it does nothing else.
OPENING = """
ALTER TABLE limits ADD COLUMN is_opening BOOLEAN DEFAULT false NOT NULL;
ALTER TABLE limits ADD CONSTRAINT ck_limits_opening CHECK (
    not is_opening or (not is_hard and alert_pct = '{}' and valid_from is null));

-- The first step of setting a quota that nobody counts for yet. From its commit on each request of the
-- scope is either one that holds the new windows or one that ended before; what is in the ledger of the
-- latter is a sum that no longer changes, and can be taken at leisure (quotas/opening.py).
CREATE FUNCTION loraplex_open_quota(
    p_limit_id uuid, p_tenant_id uuid, p_scope_kind text, p_scope_id uuid, p_metric text,
    p_period text, p_window_s integer,
    OUT window_ids bigint[], OUT first_at timestamptz, OUT opened_at timestamptz,
    OUT held_since timestamptz
)
    -- As the owner: who may set a limit need not be allowed to touch requests.
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        l limits;
        zone text;
        w quota_windows;
        ids uuid[];
    BEGIN
        PERFORM loraplex_lock_limits(p_tenant_id);
        -- Not now(): a period may have ended while this waited for the lock.
        opened_at := clock_timestamp();
        zone := loraplex_zone_of(p_tenant_id);
        SELECT p.period_start INTO first_at FROM loraplex_period(p_period, p_window_s, zone,
            opened_at - make_interval(secs => p_window_s)) p;
        -- What another process began and did not end. It cannot be at it still: see opening.lock.
        DELETE FROM limits li WHERE li.is_opening AND li.scope_kind = p_scope_kind
            AND li.scope_id = p_scope_id AND li.metric = p_metric AND li.period = p_period
            AND li.window_s = p_window_s;
        INSERT INTO limits (id, tenant_id, scope_kind, scope_id, metric, period, window_s, value,
            is_hard, is_opening)
        VALUES (p_limit_id, p_tenant_id, p_scope_kind, p_scope_id, p_metric, p_period, p_window_s,
            0, false, true)
        RETURNING * INTO l;

        -- All requests before any window, as in a settle; and requests in the order of renewals.
        w.scope_kind := p_scope_kind;
        w.scope_id := p_scope_id;
        SELECT array_agg(r.id) INTO ids FROM (
            SELECT r.id FROM requests r
            WHERE r.state = 'reserved' AND r.kind = 'user' AND r.admitted_at >= first_at
                AND loraplex_in_scope(w, r.tenant_id, r.project_id, r.key_id, r.adapter_id,
                    r.deployment_id)
            ORDER BY r.id FOR UPDATE
        ) r;
        -- New ones, for those of a limit that was removed have missed what came after it.
        DELETE FROM quota_windows q
            WHERE q.scope_kind = p_scope_kind AND q.scope_id = p_scope_id AND q.metric = p_metric
                AND q.period = p_period AND q.window_s = p_window_s
                AND (q.period_end IS NULL OR q.period_end > first_at);
        window_ids := '{}';
        -- All buckets of a rolling window: also one without a row may have had usage.
        FOR back IN 0 .. CASE p_period WHEN 'rolling' THEN 24 ELSE 0 END LOOP
            w := loraplex_window(l, opened_at - make_interval(secs => back * (p_window_s / 24)), zone);
            window_ids := window_ids || w.id;
            UPDATE requests r SET windows = r.windows || w.id
                WHERE r.id = ANY (ids) AND r.admitted_at >= w.period_start
                    AND (w.period_end IS NULL OR r.admitted_at < w.period_end);
            IF FOUND THEN
                UPDATE quota_windows q SET held = loraplex_held_sum(w) WHERE q.id = w.id;
            END IF;
        END LOOP;
        -- An id has its maker's clock in it, which may be ten minutes off.
        SELECT least(opened_at, min(r.admitted_at)) - interval '11 minutes' INTO held_since
            FROM requests r WHERE r.id = ANY (ids);
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_open_quota(uuid, uuid, text, uuid, text, text, integer)
    FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_open_quota(uuid, uuid, text, uuid, text, text, integer)
    TO loraplex_app;

-- It counted under the lock that admissions wait for.
DROP FUNCTION loraplex_set_up_quota(uuid);
"""

# With the request's id a mark says all that has changed in its bucket: readers add those requests to what
# is rolled up, and need not make the whole day anew. Null: something else has changed.
MARKS = """
ALTER TABLE rollup_dirty ADD COLUMN entry_id UUID;

CREATE OR REPLACE FUNCTION loraplex_charge(
    r requests, p_kind text, p_seq smallint, p_account text, p_prompt bigint, p_cached bigint,
    p_completion bigint
) RETURNS numeric
    LANGUAGE plpgsql
    AS $$
    DECLARE
        price record;
        amount numeric;
    BEGIN
        SELECT * INTO STRICT price FROM loraplex_entry_prices(
            r.price_book_id, r.adapter_version_id, r.deployment_id);
        amount := (p_prompt - p_cached)::numeric * price.input
            + p_cached::numeric * coalesce(price.cached_input, price.input)
            + p_completion::numeric * price.output
            -- An attempt that turned up late is no request of its own.
            + CASE p_kind WHEN 'usage' THEN coalesce(price.request, 0) ELSE 0 END;
        INSERT INTO ledger (entry_id, kind, seq, tenant_id, account, project_id, key_id,
            deployment_id, adapter_version_id, price_book_id, prompt_tokens, cached_tokens,
            completion_tokens, amount_pico)
        VALUES (r.id, p_kind, p_seq, r.tenant_id, p_account, r.project_id, r.key_id,
            r.deployment_id, r.adapter_version_id, r.price_book_id, p_prompt, p_cached,
            p_completion, amount);
        INSERT INTO rollup_dirty (tenant_id, day, entry_id)
        VALUES (r.tenant_id, (r.admitted_at AT TIME ZONE loraplex_zone_of(r.tenant_id))::date,
            CASE p_kind WHEN 'usage' THEN r.id END);
        RETURN amount;
    END
    $$;
"""

# What the marked requests of some days come to, by their buckets and as usage_daily has it.
OF_MARKS = """
CREATE FUNCTION loraplex_usage_of_marks(tenant uuid, first_day date, last_day date)
    RETURNS TABLE (
        tenant_id uuid, day date, project_id uuid, key_id uuid, deployment_id uuid, model varchar,
        adapter_version_id uuid, price_book_id uuid, requests bigint, billed_requests bigint,
        prompt_tokens bigint, cached_tokens bigint, completion_tokens bigint,
        absorbed_tokens bigint, amount_pico numeric, absorbed_pico numeric)
    -- Ten or ten thousand, each table is asked once for all of them: whatever the planner guesses, and
    -- planning for thousands of ids takes longer than finding them.
    LANGUAGE plpgsql STABLE SET plan_cache_mode = force_generic_plan SET enable_nestloop = off AS $$
#variable_conflict use_column
DECLARE
    ids uuid[];
    first_id uuid;
    last_id uuid;
BEGIN
    SELECT array_agg(d.entry_id ORDER BY d.entry_id) INTO ids FROM rollup_dirty d
        WHERE d.day BETWEEN first_day AND last_day AND (tenant IS NULL OR d.tenant_id = tenant)
            AND d.entry_id IS NOT NULL;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    first_id := ids[1];
    last_id := ids[cardinality(ids)];
    RETURN QUERY
    SELECT d.tenant_id, d.day, l.project_id, l.key_id, l.deployment_id, r.model,
        l.adapter_version_id, l.price_book_id,
        count(*), count(*) FILTER (WHERE l.account = 'revenue'),
        coalesce(sum(l.prompt_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.cached_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.completion_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(absorbed.tokens), 0)::bigint,
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'revenue'), 0),
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'absorbed'), 0)
    FROM rollup_dirty d
    JOIN requests r ON r.id = d.entry_id AND r.id = ANY (ids)
        AND r.id BETWEEN first_id AND last_id AND r.state = 'settled' AND r.kind = 'user'
    JOIN ledger l ON l.entry_id = d.entry_id AND l.entry_id = ANY (ids)
        AND l.entry_id BETWEEN first_id AND last_id AND l.kind = 'usage'
    LEFT JOIN (
        SELECT a.request_id, sum(a.absorbed) AS tokens FROM attempts a
        WHERE a.absorbed > 0 AND a.request_id = ANY (ids)
            AND a.request_id BETWEEN first_id AND last_id
        GROUP BY a.request_id
    ) absorbed ON absorbed.request_id = d.entry_id
    WHERE d.day BETWEEN first_day AND last_day AND (tenant IS NULL OR d.tenant_id = tenant)
    GROUP BY d.tenant_id, d.day, l.project_id, l.key_id, l.deployment_id, r.model,
        l.adapter_version_id, l.price_book_id;
END
$$;
"""

# Few attempts are: whoever sums what the platform paid for need not look at all the others.
ABSORBED = """
CREATE INDEX ix_attempts_absorbed ON attempts (request_id) INCLUDE (tenant_id, absorbed)
    WHERE absorbed > 0;

-- As in 0004, but joined to those, and with the ledger's lines found by their tenant.
CREATE OR REPLACE FUNCTION loraplex_usage_of(tenant uuid, on_day date)
    RETURNS TABLE (
        project_id uuid, key_id uuid, deployment_id uuid, model varchar, adapter_version_id uuid,
        price_book_id uuid, requests bigint, billed_requests bigint, prompt_tokens bigint,
        cached_tokens bigint, completion_tokens bigint, absorbed_tokens bigint,
        amount_pico numeric, absorbed_pico numeric)
    LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    zone text := (SELECT t.billing_tz FROM tenants t WHERE t.id = tenant);
    -- Wide enough for a midnight that comes twice, and for an id with its maker's clock in it, which
    -- may be ten minutes off (metering.records). What decides is the date in the tenant's zone.
    first_id uuid := loraplex_uuid7_floor(
        on_day::timestamp AT TIME ZONE zone - interval '4 hours');
    last_id uuid := loraplex_uuid7_floor(
        (on_day + 1)::timestamp AT TIME ZONE zone + interval '4 hours');
BEGIN
    RETURN QUERY
    -- Materialized: the planner takes the condition on the date for one that few rows meet, and would look
    -- up one by one what is read in one go.
    WITH lines AS MATERIALIZED (
        SELECT r.admitted_at, r.model, l.*, absorbed.tokens
        FROM requests r
        JOIN ledger l ON l.entry_id = r.id AND l.kind = 'usage'
        LEFT JOIN (
            SELECT a.request_id, sum(a.absorbed) AS tokens FROM attempts a
            WHERE a.absorbed > 0 AND a.tenant_id = tenant
                AND a.request_id >= first_id AND a.request_id < last_id
            GROUP BY a.request_id
        ) absorbed ON absorbed.request_id = r.id
        WHERE r.tenant_id = tenant AND r.kind = 'user' AND r.state = 'settled'
            AND r.id >= first_id AND r.id < last_id
            AND l.tenant_id = tenant AND l.entry_id >= first_id AND l.entry_id < last_id
    )
    SELECT l.project_id, l.key_id, l.deployment_id, l.model, l.adapter_version_id,
        l.price_book_id, count(*), count(*) FILTER (WHERE l.account = 'revenue'),
        coalesce(sum(l.prompt_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.cached_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.completion_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.tokens), 0)::bigint,
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'revenue'), 0),
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'absorbed'), 0)
    FROM lines l
    WHERE (l.admitted_at AT TIME ZONE zone)::date = on_day
    GROUP BY l.project_id, l.key_id, l.deployment_id, l.model, l.adapter_version_id,
        l.price_book_id;
END
$$;
"""

# In pieces, and one chain at a time: who cuts a log of many years holds up nobody's changes but, for a
# moment, those of one tenant. The platform's own head is locked first, for what retention does is written
# there, and heads are locked in one order.
CUT = """
DROP FUNCTION loraplex_drop_audit();
CREATE FUNCTION loraplex_drop_audit(most integer) RETURNS bigint
    LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        keep_days integer := loraplex_keep_days('audit_log');
        due_before timestamptz := now() - make_interval(days => keep_days);
        due_chain uuid;
        head audit_heads;
        last audit_log;
        gone bigint;
    BEGIN
        IF keep_days IS NULL THEN
            RETURN 0;
        END IF;
        SELECT h.chain INTO due_chain FROM audit_heads h
            JOIN audit_log a ON a.chain = h.chain AND a.seq = h.first_seq
            WHERE a.at < due_before ORDER BY h.chain LIMIT 1;
        IF NOT FOUND THEN
            RETURN 0;
        END IF;
        PERFORM 1 FROM audit_heads h
            WHERE h.chain IN (due_chain, '00000000-0000-0000-0000-000000000000')
            ORDER BY h.chain FOR UPDATE;
        SELECT * INTO STRICT head FROM audit_heads h WHERE h.chain = due_chain;
        -- The chain goes on from what the last dropped row said, so the rest stays proven.
        SELECT * INTO last FROM audit_log a WHERE a.chain = due_chain AND a.at < due_before
            AND a.seq BETWEEN head.first_seq AND head.first_seq + most - 1
            ORDER BY a.seq DESC LIMIT 1;
        IF NOT FOUND THEN
            RETURN 0;  -- somebody else was at it
        END IF;
        DELETE FROM audit_log a WHERE a.chain = due_chain AND a.seq <= last.seq;
        GET DIAGNOSTICS gone = ROW_COUNT;
        UPDATE audit_heads h SET first_seq = last.seq + 1, first_prev_hash = last.hash
            WHERE h.chain = due_chain;
        RETURN gone;
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_drop_audit(integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_drop_audit(integer) TO loraplex_app;
"""

DROP = """
DROP FUNCTION loraplex_drop_audit(integer);
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
REVOKE EXECUTE ON FUNCTION loraplex_drop_audit() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_drop_audit() TO loraplex_app;
DROP FUNCTION loraplex_usage_of_marks(uuid, date, date);
CREATE OR REPLACE FUNCTION loraplex_usage_of(tenant uuid, on_day date)
    RETURNS TABLE (
        project_id uuid, key_id uuid, deployment_id uuid, model varchar, adapter_version_id uuid,
        price_book_id uuid, requests bigint, billed_requests bigint, prompt_tokens bigint,
        cached_tokens bigint, completion_tokens bigint, absorbed_tokens bigint,
        amount_pico numeric, absorbed_pico numeric)
    LANGUAGE plpgsql STABLE SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    zone text := (SELECT t.billing_tz FROM tenants t WHERE t.id = tenant);
    -- Wide enough for a midnight that comes twice, and for an id with its maker's clock in it, which
    -- may be ten minutes off (metering.records). What decides is the date in the tenant's zone.
    first_id uuid := loraplex_uuid7_floor(
        on_day::timestamp AT TIME ZONE zone - interval '4 hours');
    last_id uuid := loraplex_uuid7_floor(
        (on_day + 1)::timestamp AT TIME ZONE zone + interval '4 hours');
BEGIN
    RETURN QUERY
    SELECT l.project_id, l.key_id, l.deployment_id, r.model, l.adapter_version_id,
        l.price_book_id, count(*), count(*) FILTER (WHERE l.account = 'revenue'),
        coalesce(sum(l.prompt_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.cached_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        coalesce(sum(l.completion_tokens) FILTER (WHERE l.account = 'revenue'), 0)::bigint,
        sum((SELECT coalesce(sum(a.absorbed), 0) FROM attempts a WHERE a.request_id = r.id))::bigint,
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'revenue'), 0),
        coalesce(sum(l.amount_pico) FILTER (WHERE l.account = 'absorbed'), 0)
    FROM requests r
    JOIN ledger l ON l.entry_id = r.id AND l.kind = 'usage'
    WHERE r.tenant_id = tenant AND r.kind = 'user' AND r.state = 'settled'
        AND r.id >= first_id AND r.id < last_id
        AND l.entry_id >= first_id AND l.entry_id < last_id
        AND (r.admitted_at AT TIME ZONE zone)::date = on_day
    GROUP BY l.project_id, l.key_id, l.deployment_id, r.model, l.adapter_version_id,
        l.price_book_id;
END
$$;
DROP INDEX ix_attempts_absorbed;
CREATE OR REPLACE FUNCTION loraplex_charge(
    r requests, p_kind text, p_seq smallint, p_account text, p_prompt bigint, p_cached bigint,
    p_completion bigint
) RETURNS numeric
    LANGUAGE plpgsql
    AS $$
    DECLARE
        price record;
        amount numeric;
    BEGIN
        SELECT * INTO STRICT price FROM loraplex_entry_prices(
            r.price_book_id, r.adapter_version_id, r.deployment_id);
        amount := (p_prompt - p_cached)::numeric * price.input
            + p_cached::numeric * coalesce(price.cached_input, price.input)
            + p_completion::numeric * price.output
            -- An attempt that turned up late is no request of its own.
            + CASE p_kind WHEN 'usage' THEN coalesce(price.request, 0) ELSE 0 END;
        INSERT INTO ledger (entry_id, kind, seq, tenant_id, account, project_id, key_id,
            deployment_id, adapter_version_id, price_book_id, prompt_tokens, cached_tokens,
            completion_tokens, amount_pico)
        VALUES (r.id, p_kind, p_seq, r.tenant_id, p_account, r.project_id, r.key_id,
            r.deployment_id, r.adapter_version_id, r.price_book_id, p_prompt, p_cached,
            p_completion, amount);
        INSERT INTO rollup_dirty (tenant_id, day)
        VALUES (r.tenant_id, (r.admitted_at AT TIME ZONE loraplex_zone_of(r.tenant_id))::date)
        ON CONFLICT DO NOTHING;
        RETURN amount;
    END
    $$;
ALTER TABLE rollup_dirty DROP COLUMN entry_id;

CREATE FUNCTION loraplex_set_up_quota(limit_id uuid) RETURNS void
    -- As the owner: who may set a limit need not be allowed to touch requests.
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        l limits;
        zone text;
        w quota_windows;
        ids bigint[] := '{}';
        at timestamptz;
    BEGIN
        SELECT * INTO STRICT l FROM limits WHERE id = limit_id;
        PERFORM loraplex_lock_limits(l.tenant_id);
        -- Not now(): a period may have ended while this waited for the lock.
        at := clock_timestamp();
        zone := loraplex_zone_of(l.tenant_id);
        -- All buckets of a rolling window: also one without a row may have had usage.
        FOR back IN 0 .. CASE l.period WHEN 'rolling' THEN 24 ELSE 0 END LOOP
            w := loraplex_window(l, at - make_interval(secs => back * (l.window_s / 24)), zone);
            ids := ids || w.id;
        END LOOP;
        PERFORM loraplex_seed_windows(ids);
        PERFORM loraplex_note_use(limit_id);
    END
    $$;
DROP FUNCTION loraplex_open_quota(uuid, uuid, text, uuid, text, text, integer);
DELETE FROM limits WHERE is_opening;
ALTER TABLE limits DROP CONSTRAINT ck_limits_opening, DROP COLUMN is_opening;
"""


def upgrade() -> None:
    run_sql(OPENING, MARKS, OF_MARKS, ABSORBED, CUT)


def downgrade() -> None:
    run_sql(DROP)
