"""Idempotency-Key on the data plane, and which tenants want answers kept for it.

Revision: 0007, after 0006.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = """
ALTER TABLE tenants ADD COLUMN replays_answers BOOLEAN DEFAULT false NOT NULL;

-- request_id has no foreign key, as all that names requests: their partitions are dropped.
CREATE TABLE idempotent_requests (
    tenant_id UUID NOT NULL,
    key_id UUID NOT NULL,
    endpoint VARCHAR(32) NOT NULL,
    key_hash BYTEA NOT NULL,
    fingerprint BYTEA NOT NULL,
    request_id UUID NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    sealed_answer BYTEA,
    CONSTRAINT pk_idempotent_requests PRIMARY KEY (tenant_id, key_id, endpoint, key_hash),
    CONSTRAINT fk_idempotent_requests_own_key FOREIGN KEY (tenant_id, key_id)
        REFERENCES api_keys (tenant_id, id)
);
CREATE INDEX ix_idempotent_requests_expires_at ON idempotent_requests (expires_at);

-- Who does not want answers kept any more has none of them kept.
CREATE FUNCTION loraplex_forget_answers() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = @@SCHEMA@@, pg_temp
    AS $$
    BEGIN
        UPDATE idempotent_requests SET sealed_answer = NULL
            WHERE tenant_id = NEW.id AND sealed_answer IS NOT NULL;
        RETURN NULL;
    END
    $$;
CREATE TRIGGER tenants_forget_answers AFTER UPDATE OF replays_answers ON tenants
    FOR EACH ROW WHEN (OLD.replays_answers AND NOT NEW.replays_answers)
    EXECUTE FUNCTION loraplex_forget_answers();

GRANT SELECT, INSERT, UPDATE, DELETE ON idempotent_requests TO loraplex_app;
"""

DROP = """
DROP TRIGGER tenants_forget_answers ON tenants;
DROP FUNCTION loraplex_forget_answers();
DROP TABLE idempotent_requests;
ALTER TABLE tenants DROP COLUMN replays_answers;
"""


def upgrade() -> None:
    run_sql(TABLES)


def downgrade() -> None:
    run_sql(DROP)
