"""Keys are found by a piece of their name without reading all of a tenant's.

Why pieces of our own and a function of the owner's: docs/adr/0011. The index is 0022's.

Revision: 0021, after 0020.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

PIECES = r"""
-- All runs of one to three characters of a key's name and public id, each with the tenant before it: what
-- an index on them finds is the tenant's own, however many others use the same names. A loop, and with
-- repetitions, which the index drops: a query that sorts them takes twenty times as long.
CREATE FUNCTION loraplex_key_pieces(tenant uuid, name text, public_id text) RETURNS text[]
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
    DECLARE
        owner text := tenant;
        word text := lower(name || E'\n' || public_id);
        found text[] := '{}';
    BEGIN
        FOR place IN 1 .. length(word) LOOP
            FOR width IN 1 .. 3 LOOP
                found := array_append(found, owner || substr(word, place, width));
            END LOOP;
        END LOOP;
        RETURN found;
    END
    $$;

-- Those of them that a name must have to hold `search`.
CREATE FUNCTION loraplex_searched_pieces(tenant uuid, search text) RETURNS text[]
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
        SELECT array_agg(DISTINCT tenant::text || substr(word, first, least(3, length(word))))
        FROM lower(search) word, generate_series(1, greatest(1, length(word) - 2)) first
    $$;
"""

SEARCH = """
-- The newest keys of a tenant with `search` in the name or the public id, newest first; `before`: only older
-- ones. No keys if a tenant's transaction names another tenant.
CREATE FUNCTION loraplex_find_keys(
    tenant uuid, search text, before uuid, of_project uuid, of_status text, most integer
) RETURNS SETOF uuid
    -- As the owner: under a policy no operator that is not leakproof may use an index.
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    SET plan_cache_mode = force_custom_plan
    AS $$
    DECLARE
        sought text := lower(search);
        pieces text[] := loraplex_searched_pieces(tenant, search);
        seen_down_to uuid;
        found uuid[];
    BEGIN
        IF current_setting('role') = 'loraplex_tenant'
            AND (tenant = ANY (loraplex_tenant_ids())) IS NOT TRUE
        THEN
            RETURN;
        END IF;
        -- What many keys have is found among the newest: the index would bring them all to be sorted.
        WITH newest AS MATERIALIZED (
            SELECT k.id, strpos(lower(k.name), sought) > 0 OR strpos(lower(k.public_id), sought) > 0 AS fits
            FROM api_keys k
            WHERE k.tenant_id = tenant AND (before IS NULL OR k.id < before)
                AND (of_project IS NULL OR k.project_id = of_project)
                AND (of_status IS NULL OR k.status = of_status)
            ORDER BY k.id DESC LIMIT 1000
        )
        SELECT (SELECT n.id FROM newest n ORDER BY n.id LIMIT 1),
            ARRAY(SELECT n.id FROM newest n WHERE n.fits ORDER BY n.id DESC LIMIT most)
        INTO seen_down_to, found;
        RETURN QUERY SELECT unnest(found);
        IF cardinality(found) >= most OR seen_down_to IS NULL THEN
            RETURN;
        END IF;
        RETURN QUERY
        -- Materialized: else the planner may walk all keys in the order of their ids instead.
        WITH fitting AS MATERIALIZED (
            SELECT k.id FROM api_keys k
            WHERE loraplex_key_pieces(k.tenant_id, k.name, k.public_id) COLLATE "C" @> pieces
                AND k.tenant_id = tenant AND k.id < seen_down_to
                AND (strpos(lower(k.name), sought) > 0 OR strpos(lower(k.public_id), sought) > 0)
                AND (of_project IS NULL OR k.project_id = of_project)
                AND (of_status IS NULL OR k.status = of_status)
        )
        SELECT f.id FROM fitting f ORDER BY f.id DESC LIMIT most - cardinality(found);
    END
    $$;
REVOKE EXECUTE ON FUNCTION loraplex_find_keys(uuid, text, uuid, uuid, text, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION loraplex_find_keys(uuid, text, uuid, uuid, text, integer)
    TO loraplex_app, loraplex_tenant;
"""

DROP = """
DROP FUNCTION loraplex_find_keys(uuid, text, uuid, uuid, text, integer);
DROP FUNCTION loraplex_searched_pieces(uuid, text);
DROP FUNCTION loraplex_key_pieces(uuid, text, text);
"""


def upgrade() -> None:
    run_sql(PIECES, SEARCH)


def downgrade() -> None:
    run_sql(DROP)
