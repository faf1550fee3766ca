"""Reservations and settlements of many requests in one transaction.

Revision: 0013.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None

# A flush of the log, a snapshot and two switches of process cost more than most of what a request needs,
# so what arrives together goes together.
# One implementation: a settlement by itself is a batch of one.
SETTLE = """
-- TX2 of many: of each a compare-and-set on state and lease, then attempts, ledger, marks, windows, alerts,
-- each in one statement for all. Of several for one request the first applies.
CREATE FUNCTION loraplex_settle_all(p_batch jsonb)
    RETURNS TABLE (item integer, applied boolean, amount_pico numeric)
    LANGUAGE plpgsql
    SET plan_cache_mode = force_generic_plan
    -- A batch is short and the tables are long, whatever they were when this was planned.
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
    AS $$
    DECLARE
        ids uuid[];
        window_ids bigint[];
        paid_windows bigint[];
        wrong text;
    BEGIN
        SELECT array_agg(i.request_id) INTO ids
            FROM jsonb_to_recordset(p_batch) AS i (request_id uuid);
        -- Requests in the order of renewals, and then windows in everybody's.
        SELECT array_agg(DISTINCT u.id) FILTER (WHERE u.id IS NOT NULL),
            array_agg(DISTINCT u.id) FILTER (WHERE u.id IS NOT NULL AND i.account = 'revenue'),
            min(format('request %s is of kind %s, not %s', q.id, q.kind, i.kind))
                FILTER (WHERE q.kind <> i.kind)
            INTO window_ids, paid_windows, wrong
        FROM (
            SELECT r.id, r.lease_token, r.kind, r.windows FROM requests r
            WHERE r.id = ANY (ids) AND r.state = 'reserved' ORDER BY r.id FOR UPDATE
        ) q
        JOIN jsonb_to_recordset(p_batch)
            AS i (request_id uuid, lease_token bigint, kind text, account text)
            ON i.request_id = q.id AND i.lease_token = q.lease_token
        LEFT JOIN unnest(q.windows) AS u (id) ON true;
        IF wrong IS NOT NULL THEN
            RAISE EXCEPTION '%', wrong;
        END IF;
        IF cardinality(window_ids) > 1 THEN
            PERFORM 1 FROM quota_windows q WHERE q.id = ANY (window_ids)
                ORDER BY loraplex_scope_rank(q.scope_kind), q.scope_id, q.metric, q.period,
                    q.window_s, q.period_start
                FOR UPDATE;
        END IF;

        RETURN QUERY
        WITH asked AS MATERIALIZED (
            SELECT * FROM jsonb_to_recordset(p_batch) AS i (
                item integer, request_id uuid, lease_token bigint, kind text, settled_by text,
                account text, attempt integer, replica_id text, outcome text, source text,
                prompt_tokens bigint, cached_tokens bigint, generated bigint, billed bigint,
                absorbed bigint, discarded_past_stop bigint, discarded_past_abort bigint,
                earlier text, finish_reason text, http_status integer, error_code text,
                ttft_ms integer, e2e_ms integer)
        ), chosen AS MATERIALIZED (
            SELECT DISTINCT ON (a.request_id) a.*
            FROM asked a JOIN requests q ON q.id = a.request_id AND q.state = 'reserved'
                AND q.lease_token = a.lease_token
            ORDER BY a.request_id, a.item
        ), done AS (
            UPDATE requests q SET
                state = 'settled', settled_at = now(), settled_by = c.settled_by,
                attempt = c.attempt, replica_id = coalesce(c.replica_id, q.replica_id),
                prompt_tokens = c.prompt_tokens, cached_tokens = c.cached_tokens,
                completion_tokens = c.billed, finish_reason = c.finish_reason,
                http_status = c.http_status, error_code = c.error_code, ttft_ms = c.ttft_ms,
                e2e_ms = c.e2e_ms
            FROM chosen c
            WHERE q.id = c.request_id AND q.state = 'reserved' AND q.lease_token = c.lease_token
            RETURNING c.*, q.replica_id AS ran_on, q.tenant_id, q.project_id, q.key_id,
                q.deployment_id, q.adapter_version_id, q.price_book_id, q.admitted_at, q.windows,
                q.est_prompt_tokens, q.est_completion_tokens, q.est_pico
        ), priced AS MATERIALIZED (
            SELECT n.*, p.* FROM (
                SELECT DISTINCT d.price_book_id AS book, d.adapter_version_id AS version,
                    d.deployment_id AS deployment FROM done d
            ) n CROSS JOIN LATERAL loraplex_entry_prices(n.book, n.version, n.deployment) p
        ), charged AS MATERIALIZED (
            -- As `loraplex_charge` does for one.
            SELECT d.*, d.account = 'revenue' AS is_paid,
                (d.prompt_tokens - d.cached_tokens)::numeric * p.input
                + d.cached_tokens::numeric * coalesce(p.cached_input, p.input)
                + (CASE d.account WHEN 'revenue' THEN d.billed ELSE d.absorbed END)::numeric
                    * p.output
                + coalesce(p.request, 0) AS amount
            FROM done d LEFT JOIN priced p ON p.book = d.price_book_id
                AND p.version IS NOT DISTINCT FROM d.adapter_version_id
                AND p.deployment IS NOT DISTINCT FROM d.deployment_id
        ), booked AS (
            INSERT INTO ledger (entry_id, kind, seq, tenant_id, account, project_id, key_id,
                deployment_id, adapter_version_id, price_book_id, prompt_tokens, cached_tokens,
                completion_tokens, amount_pico)
            SELECT c.request_id, 'usage', 0, c.tenant_id, c.account, c.project_id, c.key_id,
                c.deployment_id, c.adapter_version_id, c.price_book_id, c.prompt_tokens,
                c.cached_tokens, CASE WHEN c.is_paid THEN c.billed ELSE c.absorbed END, c.amount
            FROM charged c
        ), marked AS (
            INSERT INTO rollup_dirty (tenant_id, day, entry_id)
            SELECT c.tenant_id, (c.admitted_at AT TIME ZONE loraplex_zone_of(c.tenant_id))::date,
                c.request_id
            FROM charged c
        ), noted AS (
            INSERT INTO attempts (request_id, attempt, tenant_id, replica_id, outcome, source,
                prompt_tokens, cached_tokens, generated, billed, absorbed, discarded_past_stop,
                discarded_past_abort)
            SELECT c.request_id, c.attempt, c.tenant_id, c.ran_on, c.outcome, c.source,
                c.prompt_tokens, c.cached_tokens, c.generated, c.billed, c.absorbed,
                c.discarded_past_stop, c.discarded_past_abort
            FROM charged c
            UNION ALL
            SELECT c.request_id, e.attempt, c.tenant_id, coalesce(e.replica_id, c.ran_on),
                e.outcome, e.source, e.prompt_tokens, e.cached_tokens, e.generated, e.billed,
                e.absorbed, e.discarded_past_stop, e.discarded_past_abort
            FROM charged c CROSS JOIN LATERAL jsonb_to_recordset(c.earlier::jsonb) AS e (
                attempt integer, replica_id text, outcome text, source text, prompt_tokens bigint,
                cached_tokens bigint, generated bigint, billed bigint, absorbed bigint,
                discarded_past_stop bigint, discarded_past_abort bigint)
        ), turned AS (
            UPDATE quota_windows q SET
                committed = q.committed + CASE q.metric
                    WHEN 'requests' THEN u.requests
                    WHEN 'tokens_in' THEN u.tokens_in
                    WHEN 'tokens_out' THEN u.tokens_out
                    WHEN 'tokens_total' THEN u.tokens_in + u.tokens_out
                    ELSE u.pico END,
                -- Never an error here, whatever is wrong: the request must close. I2 finds it.
                held = greatest(0, q.held - CASE q.metric
                    WHEN 'requests' THEN u.held_requests
                    WHEN 'tokens_in' THEN u.held_in
                    WHEN 'tokens_out' THEN u.held_out
                    WHEN 'tokens_total' THEN u.held_in + u.held_out
                    ELSE u.held_pico END)
            FROM (
                SELECT w.id, count(*) FILTER (WHERE c.is_paid) AS requests,
                    coalesce(sum(c.prompt_tokens) FILTER (WHERE c.is_paid), 0) AS tokens_in,
                    coalesce(sum(c.billed) FILTER (WHERE c.is_paid), 0) AS tokens_out,
                    coalesce(sum(c.amount) FILTER (WHERE c.is_paid), 0) AS pico,
                    count(*) AS held_requests, sum(c.est_prompt_tokens) AS held_in,
                    sum(c.est_completion_tokens) AS held_out, sum(c.est_pico) AS held_pico
                FROM charged c CROSS JOIN LATERAL unnest(c.windows) AS w (id)
                GROUP BY w.id
            ) u
            WHERE q.id = u.id
        )
        SELECT a.item, c.item IS NOT NULL, c.amount
        FROM asked a LEFT JOIN charged c ON c.request_id = a.request_id AND c.item = a.item;

        -- As a rule there is none to fire, and looking is cheaper than firing.
        IF cardinality(paid_windows) > 0 THEN
            PERFORM 1 FROM quota_windows q
                JOIN limits l USING (scope_kind, scope_id, metric, period, window_s)
                CROSS JOIN unnest(l.alert_pct) AS a (pct)
                WHERE q.id = ANY (paid_windows)
                    AND (q.period = 'rolling' OR (q.committed * 100 >= l.value * a.pct
                        AND NOT EXISTS (SELECT FROM alerts_fired f WHERE f.limit_id = l.id
                            AND f.period_start = q.period_start AND f.pct = a.pct)))
                LIMIT 1;
            IF FOUND THEN
                PERFORM loraplex_fire_alerts(paid_windows);
            END IF;
        END IF;
    END
    $$;

CREATE OR REPLACE FUNCTION loraplex_settle(
    p_request_id uuid, p_lease_token bigint, p_kind text, p_settled_by text, p_account text,
    p_attempt integer, p_replica_id text, p_outcome text, p_source text, p_prompt bigint,
    p_cached bigint, p_generated bigint, p_billed bigint, p_absorbed bigint, p_past_stop bigint,
    p_past_abort bigint, p_earlier jsonb, p_finish_reason text, p_http_status integer,
    p_error_code text, p_ttft_ms integer, p_e2e_ms integer,
    OUT applied boolean, OUT amount_pico numeric
)
    LANGUAGE plpgsql
    AS $$
    BEGIN
        SELECT s.applied, s.amount_pico INTO applied, amount_pico
        FROM loraplex_settle_all(jsonb_build_array(jsonb_build_object(
            'item', 0, 'request_id', p_request_id, 'lease_token', p_lease_token, 'kind', p_kind,
            'settled_by', p_settled_by, 'account', p_account, 'attempt', p_attempt,
            'replica_id', p_replica_id, 'outcome', p_outcome, 'source', p_source,
            'prompt_tokens', p_prompt, 'cached_tokens', p_cached, 'generated', p_generated,
            'billed', p_billed, 'absorbed', p_absorbed, 'discarded_past_stop', p_past_stop,
            'discarded_past_abort', p_past_abort, 'earlier', p_earlier,
            'finish_reason', p_finish_reason, 'http_status', p_http_status,
            'error_code', p_error_code, 'ttft_ms', p_ttft_ms, 'e2e_ms', p_e2e_ms))) s;
    END
    $$;
"""

BOOK = """
-- Many `loraplex_settle` and `loraplex_reserve` in one transaction, each with its own verdict. A request
-- that would have to wait for somebody, or is the first of a quota's period, has no row in the answer:
-- whoever asks does so again for that one alone. An error undoes all of them, with the same remedy.
--
-- What may be long is never waited for here (a quota that is being set up holds its tenant's lock for as
-- long as it sums the ledger). What is short is, in the one order that everybody keeps: requests that
-- are settled by their ids, as renewals lock them, and the windows of all of the batch before any
-- other lock of theirs; or else two gateways that share windows would lock each other out.
CREATE FUNCTION loraplex_book(p_batch jsonb)
    RETURNS TABLE (
        item integer, outcome text, lease_token bigint, lease_until timestamptz,
        price_book_id uuid, max_tokens bigint, blocking jsonb, applied boolean, amount_pico numeric
    )
    LANGUAGE plpgsql
    SET plan_cache_mode = force_generic_plan SET lock_timeout = '200ms' SET jit = off
    AS $$
    DECLARE
        at CONSTANT timestamptz := now();
        nil CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
        being_set_up uuid[];  -- tenants whose limits are, just now
        busy uuid[];  -- those whose reservations go alone
        window_ids bigint[];
        settled_ids uuid[];
        settled_tenants uuid[];
        settled_windows bigint[] := '{}';
        alone_ids uuid[] := '{}';
    BEGIN
        IF NOT pg_try_advisory_xact_lock_shared(7154, 0) THEN
            RETURN;
        END IF;
        SELECT array_agg(i.request_id) INTO settled_ids
            FROM jsonb_to_recordset(p_batch) AS i (what text, request_id uuid)
            WHERE i.what = 'settle';
        IF settled_ids IS NOT NULL THEN
            SELECT array_agg(DISTINCT q.tenant_id), array_agg(DISTINCT u.id) FILTER (WHERE u.id IS NOT NULL)
                INTO settled_tenants, settled_windows
                FROM requests q LEFT JOIN unnest(q.windows) AS u (id) ON true
                WHERE q.id = ANY (settled_ids) AND q.state = 'reserved';
        END IF;
        SELECT coalesce(array_agg(t.tenant_id) FILTER (WHERE NOT
                pg_try_advisory_xact_lock_shared(7154, hashtext(t.tenant_id::text))), '{}')
            INTO being_set_up
            FROM (
                SELECT i.tenant_id FROM jsonb_to_recordset(p_batch) AS i (tenant_id uuid)
                UNION SELECT unnest(settled_tenants)
            ) t WHERE t.tenant_id IS NOT NULL;
        IF cardinality(being_set_up) > 0 THEN
            SELECT coalesce(array_agg(q.id), '{}') INTO alone_ids FROM requests q
                WHERE q.id = ANY (settled_ids) AND q.tenant_id = ANY (being_set_up);
        END IF;

        -- The windows that the reservations will lock, as `loraplex_reserve` finds them.
        SELECT coalesce(array_agg(DISTINCT w.id) FILTER (WHERE w.id IS NOT NULL), '{}'),
            coalesce(array_agg(DISTINCT c.tenant_id) FILTER (WHERE w.id IS NULL), '{}')
            INTO window_ids, busy
        FROM (
            SELECT DISTINCT i.tenant_id, i.key_id, i.deployment_id, i.adapter_version_id
            FROM jsonb_to_recordset(p_batch) AS i (what text, kind text, tenant_id uuid,
                key_id uuid, deployment_id uuid, adapter_version_id uuid)
            WHERE i.what = 'reserve' AND i.kind = 'user'
                AND i.tenant_id <> ALL (being_set_up)
        ) c
        LEFT JOIN api_keys k ON k.id = c.key_id AND k.tenant_id = c.tenant_id
        LEFT JOIN adapter_versions v
            ON v.id = c.adapter_version_id AND v.tenant_id = c.tenant_id
        JOIN limits l ON l.period IN ('day', 'month', 'total', 'rolling')
            AND l.scope_id = ANY (ARRAY[c.key_id, k.project_id, c.tenant_id, v.adapter_id,
                c.deployment_id, nil])
            AND l.scope_id = CASE l.scope_kind
                WHEN 'key' THEN c.key_id WHEN 'project' THEN k.project_id
                WHEN 'tenant' THEN c.tenant_id WHEN 'adapter' THEN v.adapter_id
                WHEN 'deployment' THEN c.deployment_id ELSE nil END
            AND (l.tenant_id IS NULL OR l.tenant_id = c.tenant_id)
        CROSS JOIN LATERAL unnest(CASE l.period
            WHEN 'rolling' THEN ARRAY[at - make_interval(secs => l.window_s / 24), at]
            ELSE ARRAY[at] END) AS needed (at)
        LEFT JOIN LATERAL (
            SELECT q.id, q.period_end FROM quota_windows q
            WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                AND q.metric = l.metric AND q.period = l.period AND q.window_s = l.window_s
                AND q.period_start <= needed.at
            ORDER BY q.period_start DESC LIMIT 1
        ) w ON w.period_end IS NULL OR needed.at < w.period_end;
        busy := busy || being_set_up;
        window_ids := window_ids || settled_windows;
        IF cardinality(window_ids) > 0 THEN
            PERFORM 1 FROM quota_windows q WHERE q.id = ANY (window_ids)
                ORDER BY loraplex_scope_rank(q.scope_kind), q.scope_id, q.metric, q.period,
                    q.window_s, q.period_start
                FOR UPDATE;
        END IF;

        -- First what gives something back, so that it is there for what asks.
        IF settled_ids IS NOT NULL THEN
            RETURN QUERY
            SELECT s.item, NULL, NULL::bigint, NULL::timestamptz, NULL::uuid, NULL::bigint,
                NULL::jsonb, s.applied, s.amount_pico
            FROM loraplex_settle_all((
                SELECT coalesce(jsonb_agg(i.one), '[]') FROM jsonb_array_elements(p_batch) AS i (one)
                WHERE i.one ->> 'what' = 'settle'
                    AND (i.one ->> 'request_id')::uuid <> ALL (alone_ids)
            )) s;
        END IF;
        RETURN QUERY
        SELECT i.item, r.outcome, r.lease_token, r.lease_until, r.price_book_id, r.max_tokens,
            r.blocking, NULL::boolean, NULL::numeric
        FROM (
            SELECT * FROM jsonb_to_recordset(p_batch) AS i (
                what text, item integer, request_id uuid, tenant_id uuid, key_id uuid,
                deployment_id uuid, revision_id uuid, adapter_version_id uuid, kind text,
                endpoint text, model text, is_stream boolean, has_stop_strings boolean, owner text,
                replica_id text, attempt integer, lease_s double precision,
                est_prompt_tokens bigint, max_tokens bigint, min_completion_tokens bigint,
                num_choices bigint, made_at_s double precision, max_skew_s double precision)
            WHERE i.what = 'reserve' AND i.tenant_id <> ALL (busy) ORDER BY i.item
        ) i
        CROSS JOIN LATERAL loraplex_reserve(i.request_id, i.tenant_id, i.key_id, i.deployment_id,
            i.revision_id, i.adapter_version_id, i.kind, i.endpoint, i.model, i.is_stream,
            i.has_stop_strings, i.owner, i.replica_id, i.attempt, i.lease_s, i.est_prompt_tokens,
            i.max_tokens, i.min_completion_tokens, i.num_choices, i.made_at_s, i.max_skew_s) r;
    END
    $$;
"""

DROP = """
DROP FUNCTION loraplex_book(jsonb);
CREATE OR REPLACE FUNCTION loraplex_settle(
    p_request_id uuid, p_lease_token bigint, p_kind text, p_settled_by text, p_account text,
    p_attempt integer, p_replica_id text, p_outcome text, p_source text, p_prompt bigint,
    p_cached bigint, p_generated bigint, p_billed bigint, p_absorbed bigint, p_past_stop bigint,
    p_past_abort bigint, p_earlier jsonb, p_finish_reason text, p_http_status integer,
    p_error_code text, p_ttft_ms integer, p_e2e_ms integer,
    OUT applied boolean, OUT amount_pico numeric
)
    LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
    AS $$
    DECLARE
        r requests;
        is_paid CONSTANT boolean := p_account = 'revenue';
    BEGIN
        UPDATE requests q SET
            state = 'settled', settled_at = now(), settled_by = p_settled_by, attempt = p_attempt,
            replica_id = coalesce(p_replica_id, q.replica_id), prompt_tokens = p_prompt,
            cached_tokens = p_cached, completion_tokens = p_billed, finish_reason = p_finish_reason,
            http_status = p_http_status, error_code = p_error_code, ttft_ms = p_ttft_ms,
            e2e_ms = p_e2e_ms
        WHERE q.id = p_request_id AND q.state = 'reserved' AND q.lease_token = p_lease_token
        RETURNING q.* INTO r;
        applied := FOUND;
        IF NOT applied THEN
            RETURN;
        END IF;
        IF r.kind <> p_kind THEN
            RAISE EXCEPTION 'request % is of kind %, not %', r.id, r.kind, p_kind;
        END IF;
        amount_pico := loraplex_charge(r, 'usage', 0::smallint, p_account, p_prompt, p_cached,
            CASE WHEN is_paid THEN p_billed ELSE p_absorbed END);
        INSERT INTO attempts (request_id, attempt, tenant_id, replica_id, outcome, source,
            prompt_tokens, cached_tokens, generated, billed, absorbed, discarded_past_stop,
            discarded_past_abort)
        VALUES (r.id, p_attempt, r.tenant_id, r.replica_id, p_outcome, p_source, p_prompt, p_cached,
            p_generated, p_billed, p_absorbed, p_past_stop, p_past_abort);
        IF p_earlier IS NOT NULL THEN
            INSERT INTO attempts (request_id, attempt, tenant_id, replica_id, outcome, source,
                prompt_tokens, cached_tokens, generated, billed, absorbed, discarded_past_stop,
                discarded_past_abort)
            SELECT r.id, e.attempt, r.tenant_id, coalesce(e.replica_id, r.replica_id), e.outcome,
                e.source, e.prompt_tokens, e.cached_tokens, e.generated, e.billed, e.absorbed,
                e.discarded_past_stop, e.discarded_past_abort
            FROM jsonb_to_recordset(p_earlier) AS e (attempt integer, replica_id text, outcome text,
                source text, prompt_tokens bigint, cached_tokens bigint, generated bigint,
                billed bigint, absorbed bigint, discarded_past_stop bigint,
                discarded_past_abort bigint);
        END IF;
        IF cardinality(r.windows) > 0 THEN
            IF is_paid THEN
                PERFORM loraplex_turn_windows(r, 1, p_prompt, p_billed, amount_pico);
                -- As a rule there is none to fire, and looking is cheaper than firing.
                PERFORM 1 FROM quota_windows q
                    JOIN limits l USING (scope_kind, scope_id, metric, period, window_s)
                    CROSS JOIN unnest(l.alert_pct) AS a (pct)
                    WHERE q.id = ANY (r.windows)
                        AND (q.period = 'rolling' OR (q.committed * 100 >= l.value * a.pct
                            AND NOT EXISTS (SELECT FROM alerts_fired f WHERE f.limit_id = l.id
                                AND f.period_start = q.period_start AND f.pct = a.pct)))
                    LIMIT 1;
                IF FOUND THEN
                    PERFORM loraplex_fire_alerts(r.windows);
                END IF;
            ELSE
                PERFORM loraplex_turn_windows(r, 0, 0, 0, 0);
            END IF;
        END IF;
    END
    $$;
DROP FUNCTION loraplex_settle_all(jsonb);
"""


def upgrade() -> None:
    run_sql(SETTLE, BOOK)


def downgrade() -> None:
    run_sql(DROP)
