"""Price books with dates and targets, rollups, invoices, credits.

Revision: 0004, after 0003.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

PRICE_BOOKS = """
ALTER TABLE price_books
    ADD COLUMN published_at TIMESTAMP WITH TIME ZONE,
    ADD COLUMN row_version INTEGER DEFAULT 1 NOT NULL,
    ALTER COLUMN effective_from DROP NOT NULL;
UPDATE price_books SET published_at = effective_from WHERE status <> 'draft';
ALTER TABLE price_books
    ADD CONSTRAINT ck_price_books_currency CHECK (currency = 'USD'),
    ADD CONSTRAINT ck_price_books_period CHECK (effective_to >= effective_from),
    ADD CONSTRAINT ck_price_books_published CHECK (
        status = 'draft' or (published_at is not null and effective_from is not null)),
    -- At any time at most one book is in force. The range type brings its own operator class.
    ADD CONSTRAINT ex_price_books_no_overlap EXCLUDE USING gist
        (tstzrange(effective_from, effective_to) WITH &&) WHERE (status <> 'draft');

ALTER TABLE price_items DROP CONSTRAINT ck_price_items_target_kind;
ALTER TABLE price_items DROP CONSTRAINT ck_price_items_token_class;
ALTER TABLE price_items DROP CONSTRAINT pk_price_items;
ALTER TABLE price_items RENAME COLUMN token_class TO price_class;
ALTER TABLE price_items RENAME COLUMN micro_usd_per_mtok TO price_pico;
ALTER TABLE price_items ADD COLUMN target_id UUID
    DEFAULT '00000000-0000-0000-0000-000000000000' NOT NULL;
UPDATE price_items SET target_kind = 'any_' || target_kind;
ALTER TABLE price_items
    ADD CONSTRAINT pk_price_items
        PRIMARY KEY (price_book_id, target_kind, target_id, price_class),
    ADD CONSTRAINT ck_price_items_target_kind CHECK (
        target_kind in ('any_base', 'any_adapter', 'base_model', 'adapter', 'deployment')),
    ADD CONSTRAINT ck_price_items_target_id CHECK (
        (target_kind in ('any_base', 'any_adapter'))
        = (target_id = '00000000-0000-0000-0000-000000000000')),
    ADD CONSTRAINT ck_price_items_price_class CHECK (
        price_class in ('input', 'cached_input', 'output', 'request'));

CREATE FUNCTION loraplex_guard_price_book() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.status <> 'draft' THEN
            RAISE check_violation USING MESSAGE = 'a price book begins as a draft';
        END IF;
        RETURN NEW;
    END IF;
    IF OLD.status = 'draft' THEN
        IF TG_OP = 'DELETE' THEN
            RETURN OLD;
        END IF;
        IF NEW.status <> 'draft' AND NEW.effective_from < now() THEN
            RAISE check_violation USING MESSAGE = 'a price book cannot take effect in the past';
        END IF;
        RETURN NEW;
    END IF;
    IF TG_OP = 'DELETE' THEN
        RAISE check_violation USING MESSAGE = 'a published price book is kept for ever';
    END IF;
    -- What has been published may only end, and only in the future: admitted requests keep its prices.
    IF NEW.status = 'draft'
        OR (NEW.id, NEW.name, NEW.currency, NEW.effective_from, NEW.published_at, NEW.created_at)
            IS DISTINCT FROM
            (OLD.id, OLD.name, OLD.currency, OLD.effective_from, OLD.published_at, OLD.created_at)
        OR (NEW.effective_to IS DISTINCT FROM OLD.effective_to
            AND (OLD.effective_to < now() OR NEW.effective_to < now()))
    THEN
        RAISE check_violation USING MESSAGE = 'a published price book never changes';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER tr_price_books_guard BEFORE INSERT OR UPDATE OR DELETE ON price_books
    FOR EACH ROW EXECUTE FUNCTION loraplex_guard_price_book();

CREATE FUNCTION loraplex_guard_price_item() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    book uuid;
    found_status text;
BEGIN
    FOREACH book IN ARRAY ARRAY[
        CASE WHEN TG_OP <> 'DELETE' THEN NEW.price_book_id END,
        CASE WHEN TG_OP <> 'INSERT' THEN OLD.price_book_id END] LOOP
        -- The lock keeps the book from being published while its prices change; what it waited for is
        -- in what it returns, where a condition would be that of before.
        SELECT status INTO found_status FROM price_books WHERE id = book FOR SHARE;
        IF found_status <> 'draft' THEN
            RAISE check_violation USING MESSAGE = 'prices of a published book never change';
        END IF;
    END LOOP;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END
$$;
CREATE TRIGGER tr_price_items_guard BEFORE INSERT OR UPDATE OR DELETE ON price_items
    FOR EACH ROW EXECUTE FUNCTION loraplex_guard_price_item();

-- The book in force at a time, or null. A retired book was in force while it lasted.
CREATE FUNCTION loraplex_book_at(at timestamptz) RETURNS uuid LANGUAGE sql STABLE AS $$
    SELECT id FROM price_books
    WHERE status <> 'draft' AND effective_from <= at AND (effective_to IS NULL OR effective_to > at)
$$;

-- Pico-USD per token of each class and per request; always one row. A null `input` or `output` says
-- that the book has no price: not servable. Per class the most specific target wins: deployment,
-- adapter, base model, any. Without a price of their own cached tokens cost what others do, and a
-- request as such costs nothing.
CREATE FUNCTION loraplex_prices(book uuid, base_model uuid, adapter uuid, deployment uuid)
    RETURNS TABLE (input bigint, cached_input bigint, output bigint, request bigint)
    LANGUAGE sql STABLE AS $$
    SELECT found.input, coalesce(found.cached_input, found.input), found.output,
        coalesce(found.request, 0)
    FROM (
        SELECT
            (array_agg(i.price_pico ORDER BY t.rank) FILTER (WHERE i.price_class = 'input'))[1]
                AS input,
            (array_agg(i.price_pico ORDER BY t.rank) FILTER (WHERE i.price_class = 'cached_input'))[1]
                AS cached_input,
            (array_agg(i.price_pico ORDER BY t.rank) FILTER (WHERE i.price_class = 'output'))[1]
                AS output,
            (array_agg(i.price_pico ORDER BY t.rank) FILTER (WHERE i.price_class = 'request'))[1]
                AS request
        FROM (VALUES
            (1, 'deployment', deployment),
            (2, 'adapter', adapter),
            (3, 'base_model', base_model),
            (4, CASE WHEN adapter IS NULL THEN 'any_base' ELSE 'any_adapter' END,
                uuid '00000000-0000-0000-0000-000000000000')
        ) AS t (rank, kind, id)
        JOIN price_items i
            ON i.price_book_id = book AND i.target_kind = t.kind AND i.target_id = t.id
    ) AS found
$$;

-- The same for what a ledger row or a request names. An adapter version that is gone is still one.
CREATE FUNCTION loraplex_entry_prices(book uuid, adapter_version uuid, deployment uuid)
    RETURNS TABLE (input bigint, cached_input bigint, output bigint, request bigint)
    LANGUAGE sql STABLE AS $$
    SELECT p.input, p.cached_input, p.output, p.request
    FROM (
        SELECT coalesce(d.base_model_id, a.base_model_id) AS base_model_id,
            coalesce(a.id, adapter_version) AS adapter_id
        FROM (SELECT 1) AS one
        LEFT JOIN adapter_versions v ON v.id = adapter_version
        LEFT JOIN adapters a ON a.id = v.adapter_id
        LEFT JOIN deployments d ON d.id = deployment
    ) AS named, loraplex_prices(book, named.base_model_id, named.adapter_id, deployment) AS p
$$;

GRANT INSERT, UPDATE, DELETE ON price_books, price_items TO loraplex_app;
"""

LEDGER = """
ALTER TABLE ledger
    ALTER COLUMN price_book_id DROP NOT NULL,
    ADD COLUMN description VARCHAR(400),
    ADD CONSTRAINT ck_ledger_price_book CHECK (
        (kind in ('usage', 'late')) = (price_book_id is not null)),
    ADD CONSTRAINT ck_ledger_sign CHECK (case kind
        when 'credit' then amount_pico < 0 and account = 'credit'
        when 'debit' then amount_pico > 0 and account = 'adjust'
        when 'reversal' then account in ('credit', 'adjust')
        else account in ('revenue', 'absorbed') end);
-- The few rows that are no usage, for balances and invoices.
CREATE INDEX ix_ledger_adjustments ON ledger (tenant_id, entry_id)
    WHERE kind in ('credit', 'debit', 'reversal');

-- What has been reversed, and by which row. The key is what makes it once; it cannot be the ledger's,
-- whose own has the time of the new row in it.
CREATE TABLE ledger_reversals (
    entry_id UUID NOT NULL,
    kind VARCHAR(16) NOT NULL,
    seq SMALLINT NOT NULL,
    tenant_id UUID NOT NULL,
    reversal_id UUID NOT NULL,
    CONSTRAINT pk_ledger_reversals PRIMARY KEY (entry_id, kind, seq),
    CONSTRAINT uq_ledger_reversals_reversal_id UNIQUE (reversal_id),
    CONSTRAINT ck_ledger_reversals_kind CHECK (kind in ('usage', 'credit', 'debit'))
);
GRANT SELECT, INSERT ON ledger_reversals TO loraplex_app;
"""

ROLLUPS = """
-- One row per dimension of a tenant's day. Made whole by loraplex_roll_up, never incremented.
CREATE TABLE usage_daily (
    tenant_id UUID NOT NULL,
    day DATE NOT NULL,
    row_no INTEGER NOT NULL,
    project_id UUID,
    key_id UUID,
    deployment_id UUID,
    model VARCHAR(128) NOT NULL,
    adapter_version_id UUID,
    price_book_id UUID NOT NULL,
    requests BIGINT NOT NULL,
    billed_requests BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    absorbed_tokens BIGINT NOT NULL,
    amount_pico NUMERIC(30, 0) NOT NULL,
    absorbed_pico NUMERIC(30, 0) NOT NULL,
    CONSTRAINT pk_usage_daily PRIMARY KEY (tenant_id, day, row_no)
);
CREATE INDEX ix_usage_daily_day ON usage_daily (day);

-- Marks, several per bucket: a settle adds its own, so that a worker can only delete marks of what it
-- sees. One shared mark could be deleted just before a settle that relied on it commits.
CREATE TABLE rollup_dirty (
    tenant_id UUID NOT NULL,
    day DATE NOT NULL
);
CREATE INDEX ix_rollup_dirty_tenant_id_day ON rollup_dirty (tenant_id, day);

-- A tenant's day, from the books: what usage_daily must hold of it.
CREATE FUNCTION loraplex_usage_of(tenant uuid, on_day date)
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

-- Whether requests of a day, in any time zone, are in a month that retention has dropped (0008).
CREATE FUNCTION loraplex_is_dropped(on_day date) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM dropped_months m
        WHERE on_day BETWEEN m.month - 1 AND (m.month + interval '1 month')::date);
END
$$;

-- Make a bucket again. False: its requests have been dropped, and what was rolled up of them stays.
CREATE FUNCTION loraplex_roll_up(tenant uuid, on_day date) RETURNS boolean
    LANGUAGE plpgsql SET plan_cache_mode = force_custom_plan AS $$
BEGIN
    IF loraplex_is_dropped(on_day) THEN
        RETURN false;
    END IF;
    DELETE FROM usage_daily u WHERE u.tenant_id = tenant AND u.day = on_day;
    INSERT INTO usage_daily (tenant_id, day, row_no, project_id, key_id, deployment_id, model,
        adapter_version_id, price_book_id, requests, billed_requests, prompt_tokens, cached_tokens,
        completion_tokens, absorbed_tokens, amount_pico, absorbed_pico)
    SELECT tenant, on_day, row_number() OVER (), u.* FROM loraplex_usage_of(tenant, on_day) u;
    RETURN true;
END
$$;

GRANT SELECT, INSERT, DELETE ON usage_daily, rollup_dirty TO loraplex_app;
"""

INVOICES = """
-- Whom an invoice is made out to. Without one the tenant's name is used.
CREATE TABLE billing_profiles (
    tenant_id UUID NOT NULL,
    legal_name VARCHAR(200) NOT NULL,
    address TEXT NOT NULL,
    email VARCHAR(254),
    tax_id VARCHAR(64),
    tax_label VARCHAR(40) DEFAULT 'Tax' NOT NULL,
    tax_ppm INTEGER DEFAULT 0 NOT NULL,
    tax_note VARCHAR(200),
    payment_days INTEGER DEFAULT 30 NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_billing_profiles PRIMARY KEY (tenant_id),
    CONSTRAINT fk_billing_profiles_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT ck_billing_profiles_tax_ppm CHECK (tax_ppm between 0 and 1000000),
    CONSTRAINT ck_billing_profiles_payment_days CHECK (payment_days between 0 and 365)
);

-- The last number given in each series. The row's lock is what leaves no gap: a number is taken in the
-- transaction that uses it.
CREATE TABLE invoice_series (
    series VARCHAR(20) NOT NULL,
    last_number BIGINT NOT NULL,
    CONSTRAINT pk_invoice_series PRIMARY KEY (series)
);

CREATE TABLE invoices (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    kind VARCHAR(16) NOT NULL,
    status VARCHAR(16) NOT NULL,
    number VARCHAR(40),
    period_start TIMESTAMP WITH TIME ZONE NOT NULL,
    period_end TIMESTAMP WITH TIME ZONE NOT NULL,
    billing_tz VARCHAR(64) NOT NULL,
    currency VARCHAR(3) DEFAULT 'USD' NOT NULL,
    issuer JSONB NOT NULL,
    customer JSONB NOT NULL,
    exact_pico NUMERIC(30, 0) NOT NULL,
    subtotal_cents BIGINT NOT NULL,
    adjustments_cents BIGINT NOT NULL,
    tax_cents BIGINT NOT NULL,
    total_cents BIGINT NOT NULL,
    brought_forward_cents BIGINT DEFAULT 0 NOT NULL,
    carried_forward_cents BIGINT DEFAULT 0 NOT NULL,
    due_cents BIGINT NOT NULL,
    corrects_id UUID,
    computed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    issued_at TIMESTAMP WITH TIME ZONE,
    due_on DATE,
    voided_at TIMESTAMP WITH TIME ZONE,
    void_reason VARCHAR(400),
    CONSTRAINT pk_invoices PRIMARY KEY (id),
    CONSTRAINT uq_invoices_number UNIQUE (number),
    CONSTRAINT uq_invoices_corrects_id UNIQUE (corrects_id),
    CONSTRAINT uq_invoices_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT fk_invoices_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_invoices_corrects_id_invoices FOREIGN KEY(corrects_id) REFERENCES invoices (id),
    CONSTRAINT ck_invoices_kind CHECK (kind in ('invoice', 'credit_note')),
    CONSTRAINT ck_invoices_status CHECK (status in ('draft', 'final', 'void')),
    CONSTRAINT ck_invoices_number CHECK ((status = 'draft') = (number is null)),
    CONSTRAINT ck_invoices_issued_at CHECK ((status = 'draft') = (issued_at is null)),
    CONSTRAINT ck_invoices_voided_at CHECK ((status = 'void') = (voided_at is not null)),
    CONSTRAINT ck_invoices_corrects CHECK ((kind = 'credit_note') = (corrects_id is not null)),
    CONSTRAINT ck_invoices_total CHECK (total_cents = subtotal_cents + adjustments_cents + tax_cents),
    CONSTRAINT ck_invoices_due CHECK (
        due_cents - carried_forward_cents = total_cents - brought_forward_cents)
);
CREATE UNIQUE INDEX uq_invoices_tenant_id_period ON invoices (tenant_id, period_start)
    WHERE kind = 'invoice' and status <> 'void';

CREATE TABLE invoice_lines (
    invoice_id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    line_no INTEGER NOT NULL,
    section VARCHAR(16) NOT NULL,
    description VARCHAR(400) NOT NULL,
    deployment_id UUID,
    model VARCHAR(128),
    adapter_version_id UUID,
    price_book_id UUID,
    price_class VARCHAR(16),
    quantity NUMERIC(30, 0) NOT NULL,
    unit_price_pico NUMERIC(30, 0) NOT NULL,
    amount_pico NUMERIC(30, 0) NOT NULL,
    amount_cents BIGINT NOT NULL,
    entry_id UUID,
    entry_kind VARCHAR(16),
    entry_seq SMALLINT,
    CONSTRAINT pk_invoice_lines PRIMARY KEY (invoice_id, line_no),
    CONSTRAINT fk_invoice_lines_tenant_id_invoice_id_invoices
        FOREIGN KEY(tenant_id, invoice_id) REFERENCES invoices (tenant_id, id),
    CONSTRAINT ck_invoice_lines_section CHECK (section in ('usage', 'earlier', 'adjustment')),
    CONSTRAINT ck_invoice_lines_amount CHECK (amount_pico = quantity * unit_price_pico)
);
CREATE INDEX ix_invoice_lines_entry ON invoice_lines (entry_id) WHERE entry_id is not null;

CREATE FUNCTION loraplex_guard_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status = 'draft' THEN
        RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    END IF;
    IF TG_OP = 'DELETE' THEN
        RAISE check_violation USING MESSAGE = 'an invoice with a number is kept for ever';
    END IF;
    IF OLD.status = 'final' AND NEW.status = 'void' AND NEW.voided_at IS NOT NULL
        AND to_jsonb(NEW) - '{status,voided_at,void_reason}'::text[]
            = to_jsonb(OLD) - '{status,voided_at,void_reason}'::text[]
    THEN
        RETURN NEW;
    END IF;
    RAISE check_violation USING MESSAGE = 'an invoice with a number never changes';
END
$$;
CREATE TRIGGER tr_invoices_guard BEFORE UPDATE OR DELETE ON invoices
    FOR EACH ROW EXECUTE FUNCTION loraplex_guard_invoice();

CREATE FUNCTION loraplex_guard_invoice_line() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    invoice uuid;
    found_status text;
BEGIN
    FOREACH invoice IN ARRAY ARRAY[
        CASE WHEN TG_OP <> 'DELETE' THEN NEW.invoice_id END,
        CASE WHEN TG_OP <> 'INSERT' THEN OLD.invoice_id END] LOOP
        -- First the lock, as with prices: it must not get its number meanwhile.
        SELECT status INTO found_status FROM invoices WHERE id = invoice FOR SHARE;
        IF found_status <> 'draft' THEN
            RAISE check_violation USING MESSAGE = 'lines of an invoice with a number never change';
        END IF;
    END LOOP;
    RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
END
$$;
CREATE TRIGGER tr_invoice_lines_guard BEFORE INSERT OR UPDATE OR DELETE ON invoice_lines
    FOR EACH ROW EXECUTE FUNCTION loraplex_guard_invoice_line();

GRANT SELECT, INSERT, UPDATE ON billing_profiles, invoice_series TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON invoices TO loraplex_app;
GRANT SELECT, INSERT, DELETE ON invoice_lines TO loraplex_app;
"""

# The books of 0001 know two targets and three classes; other prices go.
DROP = """
DROP TABLE invoice_lines, invoices, invoice_series, billing_profiles;
DROP FUNCTION loraplex_guard_invoice_line();
DROP FUNCTION loraplex_guard_invoice();
DROP FUNCTION loraplex_roll_up(uuid, date);
DROP FUNCTION loraplex_is_dropped(date);
DROP FUNCTION loraplex_usage_of(uuid, date);
DROP TABLE rollup_dirty, usage_daily;

DROP TABLE ledger_reversals;
DROP INDEX ix_ledger_adjustments;
DELETE FROM ledger WHERE price_book_id is null;
ALTER TABLE ledger
    DROP CONSTRAINT ck_ledger_sign,
    DROP CONSTRAINT ck_ledger_price_book,
    DROP COLUMN description,
    ALTER COLUMN price_book_id SET NOT NULL;

REVOKE INSERT, UPDATE, DELETE ON price_books, price_items FROM loraplex_app;
DROP FUNCTION loraplex_entry_prices(uuid, uuid, uuid);
DROP FUNCTION loraplex_prices(uuid, uuid, uuid, uuid);
DROP FUNCTION loraplex_book_at(timestamptz);
DROP TRIGGER tr_price_items_guard ON price_items;
DROP TRIGGER tr_price_books_guard ON price_books;
DROP FUNCTION loraplex_guard_price_item();
DROP FUNCTION loraplex_guard_price_book();
DELETE FROM price_items WHERE target_kind not in ('any_base', 'any_adapter')
    or price_class = 'request';
ALTER TABLE price_items
    DROP CONSTRAINT ck_price_items_price_class,
    DROP CONSTRAINT ck_price_items_target_id,
    DROP CONSTRAINT ck_price_items_target_kind,
    DROP CONSTRAINT pk_price_items,
    DROP COLUMN target_id;
UPDATE price_items SET target_kind = substr(target_kind, 5);
ALTER TABLE price_items RENAME COLUMN price_pico TO micro_usd_per_mtok;
ALTER TABLE price_items RENAME COLUMN price_class TO token_class;
ALTER TABLE price_items
    ADD CONSTRAINT pk_price_items PRIMARY KEY (price_book_id, target_kind, token_class),
    ADD CONSTRAINT ck_price_items_token_class CHECK (
        token_class in ('input', 'cached_input', 'output')),
    ADD CONSTRAINT ck_price_items_target_kind CHECK (target_kind in ('base', 'adapter'));
DELETE FROM price_items WHERE price_book_id in (SELECT id FROM price_books WHERE status = 'draft');
DELETE FROM price_books WHERE status = 'draft';
ALTER TABLE price_books
    DROP CONSTRAINT ex_price_books_no_overlap,
    DROP CONSTRAINT ck_price_books_published,
    DROP CONSTRAINT ck_price_books_period,
    DROP CONSTRAINT ck_price_books_currency,
    ALTER COLUMN effective_from SET NOT NULL,
    DROP COLUMN row_version,
    DROP COLUMN published_at;
"""


def upgrade() -> None:
    run_sql(PRICE_BOOKS, LEDGER, ROLLUPS, INVOICES)


def downgrade() -> None:
    run_sql(DROP)
