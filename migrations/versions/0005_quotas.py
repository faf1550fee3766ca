"""Limits and quota windows; reserve and settle as one call each.

Revision: 0005, after 0004.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLES = """
ALTER TABLE tenants ADD COLUMN limits_version BIGINT DEFAULT 1 NOT NULL;
ALTER TABLE tenants ADD COLUMN priority INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE tenants ADD COLUMN weight DOUBLE PRECISION DEFAULT 1 NOT NULL;
ALTER TABLE tenants ADD CONSTRAINT ck_tenants_priority CHECK (priority between -100 and 100);
ALTER TABLE tenants ADD CONSTRAINT ck_tenants_weight CHECK (weight between 0.001 and 1000);

ALTER TABLE requests ADD COLUMN adapter_id UUID;
ALTER TABLE requests ADD COLUMN windows BIGINT[] DEFAULT '{}' NOT NULL;
ALTER TABLE requests ADD COLUMN asked_completion_tokens BIGINT;
ALTER TABLE requests ADD COLUMN clamped_by UUID;

CREATE TABLE limits (
    id UUID NOT NULL,
    tenant_id UUID,
    scope_kind VARCHAR(16) NOT NULL,
    scope_id UUID NOT NULL,
    metric VARCHAR(16) NOT NULL,
    period VARCHAR(8) NOT NULL,
    window_s INTEGER DEFAULT 0 NOT NULL,
    value NUMERIC(30, 0) NOT NULL,
    burst BIGINT,
    is_hard BOOLEAN DEFAULT true NOT NULL,
    fail_mode VARCHAR(8) DEFAULT 'local' NOT NULL,
    alert_pct SMALLINT[] DEFAULT '{}' NOT NULL,
    valid_from TIMESTAMP WITH TIME ZONE,
    valid_to TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    used_then NUMERIC(30, 0) DEFAULT 0 NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_limits PRIMARY KEY (id),
    CONSTRAINT fk_limits_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_limits_scope_kind CHECK (scope_kind in ('platform', 'tenant', 'project', 'key', 'adapter', 'deployment')),
    CONSTRAINT ck_limits_platform CHECK ((scope_kind = 'platform') = (scope_id = '00000000-0000-0000-0000-000000000000')),
    CONSTRAINT ck_limits_tenant CHECK (case scope_kind when 'platform' then tenant_id is null when 'deployment' then true else tenant_id is not null end),
    CONSTRAINT ck_limits_metric CHECK (case when metric in ('rpm', 'tpm_in', 'tpm_out', 'tpm_total') then period = 'minute' when metric = 'concurrency' then period = 'none' else metric in ('requests', 'tokens_in', 'tokens_out', 'tokens_total', 'cost') and period in ('day', 'month', 'total', 'rolling') end),
    CONSTRAINT ck_limits_window_s CHECK (case period when 'rolling' then window_s between 3600 and 31622400 and window_s % 3600 = 0 else window_s = 0 end),
    CONSTRAINT ck_limits_value CHECK (value >= 0),
    CONSTRAINT ck_limits_burst CHECK (burst >= 1),
    CONSTRAINT ck_limits_fail_mode CHECK (fail_mode in ('open', 'closed', 'local')),
    CONSTRAINT ck_limits_valid CHECK (valid_from < valid_to)
);
-- One hard and one soft limit of a kind, and one for each time from which it holds.
CREATE UNIQUE INDEX uq_limits_what ON limits (scope_kind, scope_id, metric, period, window_s, is_hard, coalesce(valid_from, '-infinity'::timestamptz));
CREATE INDEX ix_limits_scope_id ON limits (scope_id);
CREATE INDEX ix_limits_tenant_id ON limits (tenant_id);

CREATE TABLE quota_windows (
    id BIGINT GENERATED ALWAYS AS IDENTITY NOT NULL,
    tenant_id UUID,
    scope_kind VARCHAR(16) NOT NULL,
    scope_id UUID NOT NULL,
    metric VARCHAR(16) NOT NULL,
    period VARCHAR(8) NOT NULL,
    window_s INTEGER DEFAULT 0 NOT NULL,
    period_start TIMESTAMP WITH TIME ZONE NOT NULL,
    period_end TIMESTAMP WITH TIME ZONE,
    committed NUMERIC(30, 0) DEFAULT 0 NOT NULL,
    held NUMERIC(30, 0) DEFAULT 0 NOT NULL,
    CONSTRAINT pk_quota_windows PRIMARY KEY (id),
    CONSTRAINT uq_quota_windows_what UNIQUE (scope_kind, scope_id, metric, period, window_s, period_start),
    CONSTRAINT ck_quota_windows_not_negative CHECK (committed >= 0 and held >= 0)
) WITH (fillfactor = 70);
CREATE INDEX ix_quota_windows_tenant_id ON quota_windows (tenant_id);

CREATE TABLE alerts_fired (
    limit_id UUID NOT NULL,
    period_start TIMESTAMP WITH TIME ZONE NOT NULL,
    pct SMALLINT NOT NULL,
    fired_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_alerts_fired PRIMARY KEY (limit_id, period_start, pct)
);

CREATE TABLE refusals (
    id UUID NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    tenant_id UUID NOT NULL,
    key_id UUID,
    code VARCHAR(64) NOT NULL,
    limit_id UUID,
    reason TEXT NOT NULL,
    count INTEGER NOT NULL,
    request_ids UUID[] NOT NULL,
    CONSTRAINT pk_refusals PRIMARY KEY (id)
);
CREATE INDEX ix_refusals_at ON refusals (at);
CREATE INDEX ix_refusals_tenant_id_at ON refusals (tenant_id, at);

GRANT SELECT, INSERT, UPDATE, DELETE ON limits TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON quota_windows TO loraplex_app;
GRANT SELECT, INSERT ON alerts_fired TO loraplex_app;
GRANT SELECT, INSERT, DELETE ON refusals TO loraplex_app;
"""

# Calendar periods in a time zone. They follow one another without gap or overlap: a day begins at the
# first moment that has its date (or a later one) there, also where clocks change at midnight.
PERIODS = """
CREATE FUNCTION loraplex_midnight(day date, zone text) RETURNS timestamptz
    LANGUAGE plpgsql STABLE STRICT PARALLEL SAFE
    AS $$
    DECLARE
        -- Of a midnight that is skipped Postgres means the jump, of one that comes twice the second.
        last_one timestamptz := day::timestamp AT TIME ZONE zone;
        turned_back interval := ((last_one - interval '24 hours') AT TIME ZONE zone)
            - (day::timestamp - interval '24 hours');
    BEGIN
        IF turned_back > interval '0'
                AND ((last_one - turned_back) AT TIME ZONE zone)::date >= day THEN
            RETURN last_one - turned_back;
        END IF;
        RETURN last_one;
    END
    $$;

CREATE FUNCTION loraplex_period(
    period text, window_s integer, zone text, at timestamptz,
    OUT period_start timestamptz, OUT period_end timestamptz
)
    LANGUAGE plpgsql STABLE PARALLEL SAFE
    AS $$
    DECLARE
        first_day date;
        next_day date;
        bucket_s integer;
        step interval;
    BEGIN
        IF period = 'total' THEN
            period_start := 'epoch';
            RETURN;
        ELSIF period = 'rolling' THEN
            -- A bucket of 24: what is used is what is in the last 24 whole ones and the one of now, so
            -- something counts for at most one bucket longer than `window_s`, and never shorter.
            bucket_s := window_s / 24;
            period_start := to_timestamp(floor(extract(epoch FROM at) / bucket_s) * bucket_s);
            period_end := period_start + make_interval(secs => bucket_s);
            RETURN;
        ELSIF period NOT IN ('day', 'month') THEN
            RAISE EXCEPTION 'no such period: %', period;
        END IF;
        step := ('1 ' || period)::interval;
        first_day := date_trunc(period, at AT TIME ZONE zone)::date;
        LOOP
            next_day := (first_day + step)::date;
            period_end := loraplex_midnight(next_day, zone);
            -- Not so in the hour after a midnight that was taken back: it is of the new day.
            EXIT WHEN at < period_end;
            first_day := next_day;
        END LOOP;
        period_start := loraplex_midnight(first_day, zone);
    END
    $$;
"""

# Windows are locked in one order everywhere, what many requests share last: see `rank`.
WINDOWS = """
CREATE FUNCTION loraplex_scope_rank(scope_kind text) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
        SELECT CASE scope_kind WHEN 'key' THEN 1 WHEN 'project' THEN 2 WHEN 'tenant' THEN 3
            WHEN 'adapter' THEN 4 WHEN 'deployment' THEN 5 ELSE 6 END
    $$;

-- Whoever sets a limit up waits for admissions under way, which share this lock, and they for it: so
-- no request is neither among those that are counted then nor one that holds the new window.
CREATE FUNCTION loraplex_lock_limits(tenant uuid) RETURNS void
    LANGUAGE sql
    AS $$ SELECT pg_advisory_xact_lock(7154, coalesce(hashtext(tenant::text), 0)) $$;

CREATE FUNCTION loraplex_zone_of(tenant uuid) RETURNS text
    LANGUAGE sql STABLE
    AS $$ SELECT coalesce((SELECT billing_tz FROM tenants WHERE id = tenant), 'UTC') $$;

-- Turn what a request holds into what it used, in all its windows.
CREATE FUNCTION loraplex_turn_windows(
    r requests, used_requests integer, used_in bigint, used_out bigint, used_pico numeric
) RETURNS void
    LANGUAGE plpgsql
    AS $$
    BEGIN
        IF cardinality(r.windows) = 0 THEN
            RETURN;
        END IF;
        IF cardinality(r.windows) > 1 THEN
            PERFORM 1 FROM quota_windows q WHERE q.id = ANY (r.windows)
                ORDER BY loraplex_scope_rank(q.scope_kind), q.scope_id, q.metric, q.period,
                    q.window_s, q.period_start
                FOR UPDATE;
        END IF;
        UPDATE quota_windows q SET
            committed = q.committed + CASE q.metric
                WHEN 'requests' THEN used_requests
                WHEN 'tokens_in' THEN used_in
                WHEN 'tokens_out' THEN used_out
                WHEN 'tokens_total' THEN used_in + used_out
                ELSE used_pico END,
            -- Never an error here, whatever is wrong: the request must close. I2 finds it.
            held = greatest(0, q.held - CASE q.metric
                WHEN 'requests' THEN 1
                WHEN 'tokens_in' THEN r.est_prompt_tokens
                WHEN 'tokens_out' THEN r.est_completion_tokens
                WHEN 'tokens_total' THEN r.est_prompt_tokens + r.est_completion_tokens
                ELSE r.est_pico END)
        WHERE q.id = ANY (r.windows);
    END
    $$;

-- Whether an account line is of this window's scope.
CREATE FUNCTION loraplex_in_scope(
    w quota_windows, tenant uuid, project uuid, key uuid, adapter uuid, deployment uuid
) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
        SELECT CASE w.scope_kind
            WHEN 'platform' THEN true
            WHEN 'tenant' THEN tenant = w.scope_id
            WHEN 'project' THEN project = w.scope_id
            WHEN 'key' THEN key = w.scope_id
            WHEN 'adapter' THEN adapter = w.scope_id
            ELSE deployment = w.scope_id END
    $$;

-- What tenants have paid for in a window's period, by the ledger. A request counts in the period that
-- it was admitted in; where its row is gone, its id says when that was.
CREATE FUNCTION loraplex_ledger_sum(w quota_windows) RETURNS numeric
    LANGUAGE plpgsql STABLE
    AS $$
    DECLARE
        -- Ids are at most ten minutes off: so this reads a period's own lines only.
        first_id uuid := loraplex_uuid7_floor(greatest(w.period_start - interval '11 minutes', 'epoch'));
        end_id uuid := coalesce(loraplex_uuid7_floor(w.period_end + interval '11 minutes'),
            'ffffffff-ffff-ffff-ffff-ffffffffffff');
        used numeric;
    BEGIN
        SELECT coalesce(sum(CASE w.metric
            WHEN 'requests' THEN 1
            WHEN 'tokens_in' THEN l.prompt_tokens
            WHEN 'tokens_out' THEN l.completion_tokens
            WHEN 'tokens_total' THEN l.prompt_tokens + l.completion_tokens
            ELSE l.amount_pico END), 0) INTO used
        FROM ledger l
        LEFT JOIN requests r ON r.id = l.entry_id AND r.id >= first_id AND r.id < end_id
        LEFT JOIN adapter_versions v ON r.id IS NULL AND v.id = l.adapter_version_id
        CROSS JOIN LATERAL (
            SELECT coalesce(r.admitted_at, to_timestamp(
                ('x' || left(replace(l.entry_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0)) AS at
        ) admitted
        WHERE l.kind = 'usage' AND l.account = 'revenue' AND l.entry_id >= first_id
            AND l.entry_id < end_id
            -- What counts everybody's requests reads everybody's lines; the others by their index.
            AND l.tenant_id = ANY (CASE WHEN w.tenant_id IS NULL
                THEN (SELECT array_agg(t.id) FROM tenants t) ELSE ARRAY[w.tenant_id] END)
            AND admitted.at >= w.period_start
            AND (w.period_end IS NULL OR admitted.at < w.period_end)
            AND loraplex_in_scope(w, l.tenant_id, l.project_id, l.key_id,
                coalesce(r.adapter_id, v.adapter_id), l.deployment_id);
        RETURN used;
    END
    $$;

-- What the requests in flight that hold a window have reserved in it.
CREATE FUNCTION loraplex_held_sum(w quota_windows) RETURNS numeric
    LANGUAGE sql STABLE
    AS $$
        SELECT coalesce(sum(CASE w.metric
            WHEN 'requests' THEN 1
            WHEN 'tokens_in' THEN r.est_prompt_tokens
            WHEN 'tokens_out' THEN r.est_completion_tokens
            WHEN 'tokens_total' THEN r.est_prompt_tokens + r.est_completion_tokens
            ELSE r.est_pico END), 0)
        FROM requests r WHERE r.state = 'reserved' AND r.windows @> ARRAY[w.id]
    $$;

-- Count windows anew: what is on the ledger, and the requests in flight, which hold them from now on.
CREATE FUNCTION loraplex_seed_windows(window_ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
    DECLARE
        w quota_windows;
    BEGIN
        -- All requests before any window, as in a settle; and requests in the order of renewals.
        PERFORM 1 FROM requests r JOIN quota_windows q ON q.id = ANY (window_ids)
            WHERE r.state = 'reserved' AND r.kind = 'user' AND r.admitted_at >= q.period_start
                AND (q.period_end IS NULL OR r.admitted_at < q.period_end)
                AND loraplex_in_scope(q, r.tenant_id, r.project_id, r.key_id, r.adapter_id,
                    r.deployment_id)
            ORDER BY r.id FOR UPDATE OF r;
        FOR w IN SELECT * FROM quota_windows q WHERE q.id = ANY (window_ids) LOOP
            UPDATE requests r SET windows = r.windows || w.id
                WHERE r.state = 'reserved' AND r.kind = 'user' AND NOT (r.windows @> ARRAY[w.id])
                    AND r.admitted_at >= w.period_start
                    AND (w.period_end IS NULL OR r.admitted_at < w.period_end)
                    AND loraplex_in_scope(w, r.tenant_id, r.project_id, r.key_id, r.adapter_id,
                        r.deployment_id);
        END LOOP;
        FOR w IN SELECT * FROM quota_windows q WHERE q.id = ANY (window_ids)
            ORDER BY loraplex_scope_rank(q.scope_kind), q.scope_id, q.metric, q.period, q.window_s,
                q.period_start
            FOR UPDATE
        LOOP
            UPDATE quota_windows SET committed = loraplex_ledger_sum(w),
                held = loraplex_held_sum(w) WHERE id = w.id;
        END LOOP;
    END
    $$;

-- The window of `at`; made if there is none. Its boundaries are computed once and stay.
CREATE FUNCTION loraplex_window(l limits, at timestamptz, zone text) RETURNS quota_windows
    LANGUAGE plpgsql
    AS $$
    DECLARE
        w quota_windows;
        first_at timestamptz;
        end_at timestamptz;
    BEGIN
        FOR tries IN 1 .. 2 LOOP
            SELECT * INTO w FROM quota_windows q
                WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                    AND q.metric = l.metric AND q.period = l.period AND q.window_s = l.window_s
                    AND q.period_start <= at
                ORDER BY q.period_start DESC LIMIT 1;
            EXIT WHEN w.id IS NOT NULL AND (w.period_end IS NULL OR at < w.period_end);
            SELECT p.period_start, p.period_end INTO first_at, end_at
                FROM loraplex_period(l.period, l.window_s, zone, at) p;
            INSERT INTO quota_windows (tenant_id, scope_kind, scope_id, metric, period, window_s,
                period_start, period_end)
            VALUES (l.tenant_id, l.scope_kind, l.scope_id, l.metric, l.period, l.window_s,
                first_at, end_at)
            ON CONFLICT DO NOTHING;
        END LOOP;
        RETURN w;
    END
    $$;

-- After a quota was set: its windows, counted from the ledger and from what is in flight.
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

-- When a limit was set or changed, and what was used of it then: it bounds what comes after (I7).
CREATE FUNCTION loraplex_note_use(limit_id uuid) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
        -- The clock's time, not the transaction's: it may have waited for a lock into another period.
        UPDATE limits l SET changed_at = c.at, used_then = coalesce((
            SELECT sum(q.committed + q.held) FROM quota_windows q
            WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                AND q.metric = l.metric AND q.period = l.period AND q.window_s = l.window_s
                AND CASE l.period WHEN 'rolling'
                    THEN q.period_start > c.at - make_interval(secs => l.window_s / 24 * 25)
                    ELSE q.period_end IS NULL OR q.period_end > c.at END), 0)
        FROM (SELECT clock_timestamp() AS at OFFSET 0) c WHERE l.id = limit_id
    $$;

-- A tenant in another time zone has other periods at once; what was used in them stays used.
CREATE FUNCTION loraplex_move_zone() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        ids bigint[];
        at timestamptz;
    BEGIN
        PERFORM loraplex_lock_limits(NEW.id);
        at := clock_timestamp();
        WITH moved AS (
            UPDATE quota_windows q SET (period_start, period_end) = (
                SELECT p.period_start, p.period_end
                FROM loraplex_period(q.period, q.window_s, NEW.billing_tz, at) p)
            WHERE q.tenant_id = NEW.id AND q.period IN ('day', 'month')
                AND q.period_start <= at AND q.period_end > at
            RETURNING q.id
        )
        SELECT array_agg(id) INTO ids FROM moved;
        PERFORM loraplex_seed_windows(coalesce(ids, '{}'));
        RETURN NULL;
    END
    $$;
CREATE TRIGGER tenants_move_zone AFTER UPDATE OF billing_tz ON tenants
    FOR EACH ROW WHEN (OLD.billing_tz IS DISTINCT FROM NEW.billing_tz)
    EXECUTE FUNCTION loraplex_move_zone();

-- Gateways keep what holds for a caller as long as the tenant's version of it stays. A limit of
-- everybody's requests changes no tenant, of which there may be very many: gateways read it again
-- within seconds.
CREATE FUNCTION loraplex_bump_limits() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    DECLARE
        owner uuid := CASE WHEN TG_OP = 'DELETE' THEN OLD.tenant_id ELSE NEW.tenant_id END;
    BEGIN
        UPDATE tenants SET limits_version = limits_version + 1 WHERE id = owner;
        RETURN NULL;
    END
    $$;
CREATE TRIGGER limits_bump
    AFTER INSERT OR DELETE OR UPDATE OF value, burst, fail_mode, valid_from, valid_to ON limits
    FOR EACH ROW EXECUTE FUNCTION loraplex_bump_limits();
"""

CALLS = """
-- The three below are planned once a connection: the planner would rather plan each time, since a plan
-- for one partition looks cheap, but planning takes longer than all the rest.

-- TX1 in one round trip: price, tenant and key are looked at, every quota is checked at its worst case,
-- `max_tokens` is cut to what the tightest still pays, and only if all pass is anything taken.
-- outcome: reserved | refused (see `blocking`) | too_large (so is it for an empty window) | other (the
-- key, the tenant, the price or a clock does not allow it, or the id is known).
CREATE FUNCTION loraplex_reserve(
    p_request_id uuid, p_tenant_id uuid, p_key_id uuid, p_deployment_id uuid, p_revision_id uuid,
    p_adapter_version_id uuid, p_kind text, p_endpoint text, p_model text, p_is_stream boolean,
    p_has_stop_strings boolean, p_owner text, p_replica_id text, p_attempt integer,
    p_lease_s double precision, p_prompt_tokens bigint, p_max_tokens bigint, p_min_tokens bigint, p_num_choices bigint,
    p_made_at_s double precision, p_max_skew_s double precision,
    OUT outcome text, OUT lease_token bigint, OUT lease_until timestamptz, OUT price_book_id uuid,
    OUT max_tokens bigint, OUT blocking jsonb
)
    LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
    AS $$
    DECLARE
        nil CONSTANT uuid := '00000000-0000-0000-0000-000000000000';
        at CONSTANT timestamptz := now();
        zone text;
        project uuid;
        adapter uuid;
        price record;
        prompt_price bigint;
        l limits;
        w quota_windows;
        previous_what text := '';
        what text;
        window_ids bigint[] := '{}';
        committed numeric;
        held numeric;
        fixed numeric;
        each numeric;
        allowed numeric;
        is_too_large boolean;
        best numeric := p_max_tokens;
        clamper uuid;
        least_tokens bigint := least(p_min_tokens, p_max_tokens);
        num_completion bigint;
        worst_pico numeric;
    BEGIN
        outcome := 'other';
        PERFORM pg_advisory_xact_lock_shared(7154, 0),
            pg_advisory_xact_lock_shared(7154, hashtext(p_tenant_id::text));
        SELECT t.billing_tz, k.project_id INTO zone, project
        FROM tenants t LEFT JOIN api_keys k ON k.tenant_id = t.id AND k.id = p_key_id
        WHERE t.id = p_tenant_id AND t.status = 'active'
            AND (p_kind = 'probe' OR (k.status = 'active' AND k.revoked_at IS NULL
                AND (k.expires_at IS NULL OR k.expires_at > at)));
        IF NOT FOUND OR abs(p_made_at_s - extract(epoch FROM at)) > p_max_skew_s THEN
            RETURN;
        END IF;
        price_book_id := loraplex_book_at(at);
        SELECT * INTO price FROM loraplex_entry_prices(
            price_book_id, p_adapter_version_id, p_deployment_id);
        IF price.input IS NULL OR price.output IS NULL THEN
            RETURN;
        END IF;
        prompt_price := greatest(price.input, price.cached_input);
        IF p_adapter_version_id IS NOT NULL THEN
            SELECT v.adapter_id INTO adapter FROM adapter_versions v
                WHERE v.id = p_adapter_version_id AND v.tenant_id = p_tenant_id;
        END IF;

        -- A probe is the platform's own: no quota of the tenant's is asked or charged.
        FOR l IN
            SELECT * FROM limits li
            WHERE p_kind = 'user' AND li.period IN ('day', 'month', 'total', 'rolling')
                AND li.scope_id = ANY (ARRAY[
                    p_key_id, project, p_tenant_id, adapter, p_deployment_id, nil])
                AND li.scope_id = CASE li.scope_kind
                    WHEN 'key' THEN p_key_id WHEN 'project' THEN project
                    WHEN 'tenant' THEN p_tenant_id WHEN 'adapter' THEN adapter
                    WHEN 'deployment' THEN p_deployment_id ELSE nil END
                AND (li.tenant_id IS NULL OR li.tenant_id = p_tenant_id)
            ORDER BY loraplex_scope_rank(li.scope_kind), li.scope_id, li.metric, li.period,
                li.window_s
        LOOP
            what := concat_ws(' ', l.scope_kind, l.metric, l.period, l.window_s);
            IF what <> previous_what THEN  -- else the same window: a hard and a soft limit share it
                previous_what := what;
                IF l.period <> 'rolling' THEN
                    SELECT * INTO w FROM quota_windows q
                        WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                            AND q.metric = l.metric AND q.period = l.period AND q.window_s = 0
                            AND q.period_start <= at
                        ORDER BY q.period_start DESC LIMIT 1
                        FOR UPDATE;
                    IF w.id IS NULL OR at >= w.period_end THEN  -- the first of its period
                        w := loraplex_window(l, at,
                            CASE WHEN l.tenant_id IS NULL THEN 'UTC' ELSE zone END);
                        SELECT * INTO w FROM quota_windows q WHERE q.id = w.id FOR UPDATE;
                    END IF;
                    committed := w.committed;
                    held := w.held;
                ELSE
                    -- The bucket before is locked too: so two requests at a bucket's end see each other.
                    w := loraplex_window(l, at - make_interval(secs => l.window_s / 24), zone);
                    PERFORM 1 FROM quota_windows q WHERE q.id = w.id FOR UPDATE;
                    w := loraplex_window(l, at, zone);
                    PERFORM 1 FROM quota_windows q WHERE q.id = w.id FOR UPDATE;
                    SELECT sum(q.committed), sum(q.held) INTO committed, held
                    FROM quota_windows q
                    WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                        AND q.metric = l.metric AND q.period = l.period AND q.window_s = l.window_s
                        AND q.period_start > at - make_interval(secs => l.window_s / 24 * 25);
                END IF;
                window_ids := window_ids || w.id;
            END IF;
            CONTINUE WHEN NOT l.is_hard OR at < l.valid_from OR at >= l.valid_to;
            fixed := CASE l.metric
                WHEN 'requests' THEN 1
                WHEN 'tokens_in' THEN p_prompt_tokens
                WHEN 'tokens_out' THEN 0
                WHEN 'tokens_total' THEN p_prompt_tokens
                ELSE p_prompt_tokens::numeric * prompt_price + coalesce(price.request, 0) END;
            each := CASE l.metric
                WHEN 'tokens_out' THEN p_num_choices
                WHEN 'tokens_total' THEN p_num_choices
                WHEN 'cost' THEN p_num_choices::numeric * price.output
                ELSE 0 END;
            allowed := l.value - committed - held - fixed;
            IF each > 0 THEN
                allowed := floor(allowed / each);
            ELSE
                allowed := CASE WHEN allowed < 0 THEN -1 ELSE best END;
            END IF;
            -- Of 0 is closed: then it is not the request that is too large.
            is_too_large := l.value > 0 AND fixed + each * least_tokens > l.value;
            IF allowed < best OR is_too_large THEN
                best := least(best, allowed);
                clamper := l.id;
                IF allowed < least_tokens THEN
                    outcome := CASE WHEN is_too_large THEN 'too_large' ELSE 'refused' END;
                    blocking := jsonb_build_object(
                        'limit_id', l.id, 'scope_kind', l.scope_kind, 'scope_id', l.scope_id,
                        'is_shared', l.tenant_id IS NULL, 'metric', l.metric,
                        'period', l.period, 'window_s', l.window_s,
                        'value', l.value, 'committed', committed, 'held', held,
                        'asked', fixed + each * least_tokens, 'zone',
                        CASE WHEN l.tenant_id IS NULL THEN 'UTC' ELSE zone END,
                        'resets_at', extract(epoch FROM CASE l.period WHEN 'rolling' THEN (
                            SELECT min(q.period_end) + make_interval(secs => l.window_s)
                            FROM quota_windows q
                            WHERE q.scope_kind = l.scope_kind AND q.scope_id = l.scope_id
                                AND q.metric = l.metric AND q.period = l.period
                                AND q.window_s = l.window_s AND q.committed + q.held > 0
                                AND q.period_start > at - make_interval(secs => l.window_s / 24 * 25)
                        ) ELSE w.period_end END));
                END IF;
            END IF;
            EXIT WHEN outcome = 'too_large';  -- whatever else refuses it: this will not change
        END LOOP;
        IF outcome <> 'other' THEN
            -- What is held may be held by this very request: the answer to its COMMIT was lost.
            PERFORM 1 FROM requests q WHERE q.id = p_request_id;
            IF FOUND THEN
                outcome := 'other';
                blocking := NULL;
            END IF;
            RETURN;
        END IF;

        max_tokens := best;
        num_completion := max_tokens * p_num_choices;
        worst_pico := p_prompt_tokens::numeric * prompt_price
            + num_completion::numeric * price.output + coalesce(price.request, 0);
        INSERT INTO requests (
            id, tenant_id, project_id, key_id, deployment_id, revision_id, adapter_id,
            adapter_version_id, price_book_id, kind, endpoint, model, is_stream,
            has_stop_strings, owner, replica_id, attempt, lease_until, est_prompt_tokens,
            est_completion_tokens, est_pico, windows, asked_completion_tokens, clamped_by)
        VALUES (
            p_request_id, p_tenant_id, project, p_key_id, p_deployment_id, p_revision_id,
            adapter, p_adapter_version_id, price_book_id, p_kind, p_endpoint, p_model, p_is_stream,
            p_has_stop_strings, p_owner, p_replica_id, p_attempt,
            at + make_interval(secs => p_lease_s), p_prompt_tokens, num_completion, worst_pico,
            window_ids, p_max_tokens * p_num_choices, clamper)
        ON CONFLICT (id) DO NOTHING
        RETURNING requests.lease_token, requests.lease_until INTO lease_token, lease_until;
        IF lease_token IS NULL THEN
            RETURN;
        END IF;
        outcome := 'reserved';
        IF cardinality(window_ids) > 0 THEN
            UPDATE quota_windows q SET
                held = q.held + CASE q.metric
                    WHEN 'requests' THEN 1
                    WHEN 'tokens_in' THEN p_prompt_tokens
                    WHEN 'tokens_out' THEN num_completion
                    WHEN 'tokens_total' THEN p_prompt_tokens + num_completion
                    ELSE worst_pico END
            WHERE q.id = ANY (window_ids);
        END IF;
    END
    $$;

-- Thresholds that a request's windows have passed: each once per limit, period and percentage.
CREATE FUNCTION loraplex_fire_alerts(window_ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
    BEGIN
        WITH used AS (
            SELECT q.scope_kind, q.scope_id, q.metric, q.period, q.window_s, q.tenant_id,
                -- Of a rolling window at most one alert in each stretch of its length.
                CASE q.period WHEN 'rolling' THEN to_timestamp(
                    floor(extract(epoch FROM q.period_start) / q.window_s) * q.window_s)
                    ELSE q.period_start END AS period_start,
                CASE q.period WHEN 'rolling' THEN (
                    SELECT sum(b.committed) FROM quota_windows b
                    WHERE b.scope_kind = q.scope_kind AND b.scope_id = q.scope_id
                        AND b.metric = q.metric AND b.period = q.period AND b.window_s = q.window_s
                        AND b.period_start > now() - make_interval(secs => q.window_s / 24 * 25))
                    ELSE q.committed END AS committed
            FROM quota_windows q WHERE q.id = ANY (window_ids)
        ), passed AS (
            SELECT l.id, u.period_start, pct, u.committed
            FROM used u JOIN limits l USING (scope_kind, scope_id, metric, period, window_s),
                unnest(l.alert_pct) AS pct
            WHERE u.committed * 100 >= l.value * pct
                AND (l.valid_from IS NULL OR l.valid_from <= now())
                AND (l.valid_to IS NULL OR l.valid_to > now())
        ), fired AS (
            INSERT INTO alerts_fired (limit_id, period_start, pct)
            SELECT id, period_start, pct FROM passed
            ON CONFLICT DO NOTHING
            RETURNING limit_id, period_start, pct
        )
        INSERT INTO outbox (topic, dedupe_key, payload)
        SELECT 'alert', concat_ws(':', l.id, extract(epoch FROM f.period_start)::bigint, f.pct),
            jsonb_build_object('limit_id', l.id, 'tenant_id', l.tenant_id,
                'scope_kind', l.scope_kind, 'scope_id', l.scope_id, 'metric', l.metric,
                'period', l.period, 'window_s', l.window_s, 'is_hard', l.is_hard,
                'value', l.value::text, 'used', p.committed::text, 'pct', f.pct,
                'period_start', extract(epoch FROM f.period_start)::bigint)
        FROM fired f JOIN limits l ON l.id = f.limit_id
        JOIN passed p ON p.id = f.limit_id AND p.pct = f.pct AND p.period_start = f.period_start
        ON CONFLICT DO NOTHING;
    END
    $$;

-- One line of account for a request, at the prices of its book, and the day that it changes.
CREATE FUNCTION loraplex_charge(
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

-- TX2 in one round trip: a compare-and-set on state and lease, then attempts, ledger, windows, alerts.
CREATE FUNCTION loraplex_settle(
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

-- Close a request that no engine worked on: it holds nothing any more, and nothing is charged.
CREATE FUNCTION loraplex_void(
    p_request_id uuid, p_lease_token bigint, p_voided_by text, p_http_status integer,
    p_error_code text
) RETURNS boolean
    LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
    AS $$
    DECLARE
        r requests;
    BEGIN
        UPDATE requests q SET state = 'voided', settled_at = now(), settled_by = p_voided_by,
            http_status = p_http_status, error_code = p_error_code
        WHERE q.id = p_request_id AND q.state = 'reserved' AND q.lease_token = p_lease_token
        RETURNING q.* INTO r;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        PERFORM loraplex_turn_windows(r, 0, 0, 0, 0);
        RETURN true;
    END
    $$;

-- An attempt that turned up after its request was closed without it: the platform pays for it.
CREATE FUNCTION loraplex_absorb_late(
    p_request_id uuid, p_attempt integer, p_replica_id text, p_prompt bigint, p_cached bigint,
    p_generated bigint
) RETURNS numeric
    LANGUAGE plpgsql
    AS $$
    DECLARE
        r requests;
    BEGIN
        SELECT * INTO STRICT r FROM requests WHERE id = p_request_id;
        INSERT INTO attempts (request_id, attempt, tenant_id, replica_id, outcome, source,
            prompt_tokens, cached_tokens, generated, billed, absorbed, discarded_past_stop,
            discarded_past_abort)
        VALUES (r.id, p_attempt, r.tenant_id, p_replica_id, 'lost', 'journal', p_prompt, p_cached,
            p_generated, 0, p_generated, 0, 0);
        RETURN loraplex_charge(r, 'late', p_attempt::smallint, 'absorbed', p_prompt, p_cached,
            p_generated);
    END
    $$;
"""


DROP = """
DROP FUNCTION loraplex_absorb_late, loraplex_void, loraplex_settle, loraplex_charge,
    loraplex_fire_alerts, loraplex_reserve;
DROP TRIGGER tenants_move_zone ON tenants;
DROP FUNCTION loraplex_move_zone, loraplex_set_up_quota, loraplex_note_use, loraplex_window, loraplex_seed_windows,
    loraplex_held_sum, loraplex_ledger_sum, loraplex_in_scope, loraplex_turn_windows,
    loraplex_zone_of, loraplex_lock_limits, loraplex_scope_rank,
    loraplex_period, loraplex_midnight;
DROP TABLE refusals, alerts_fired, limits, quota_windows;
DROP FUNCTION loraplex_bump_limits;
ALTER TABLE requests DROP COLUMN adapter_id, DROP COLUMN windows,
    DROP COLUMN asked_completion_tokens, DROP COLUMN clamped_by;
ALTER TABLE tenants DROP COLUMN limits_version, DROP COLUMN priority, DROP COLUMN weight;
"""


def upgrade() -> None:
    run_sql(TABLES, PERIODS, WINDOWS, CALLS)


def downgrade() -> None:
    run_sql(DROP)
