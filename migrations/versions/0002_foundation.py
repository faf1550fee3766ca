"""Projects below a tenant, and the outbox: what several later migrations build on.

Revision: 0002, after 0001.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE projects (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    archived_at TIMESTAMP WITH TIME ZONE,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_projects PRIMARY KEY (id),
    CONSTRAINT fk_projects_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT uq_projects_tenant_id_id UNIQUE (tenant_id, id)
);
CREATE UNIQUE INDEX uq_projects_tenant_id_name ON projects (tenant_id, lower(name)) WHERE archived_at is null;

ALTER TABLE api_keys ADD COLUMN project_id UUID;
ALTER TABLE api_keys ADD CONSTRAINT fk_api_keys_own_project
    FOREIGN KEY (tenant_id, project_id) REFERENCES projects (tenant_id, id);
-- Kept without foreign keys, as their other ids: a partition may outlive what it names.
ALTER TABLE requests ADD COLUMN project_id UUID;
ALTER TABLE ledger ADD COLUMN project_id UUID;

CREATE TABLE outbox (
    id BIGINT GENERATED ALWAYS AS IDENTITY NOT NULL,
    topic VARCHAR(64) NOT NULL,
    dedupe_key VARCHAR(200) NOT NULL,
    payload JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    tries INTEGER DEFAULT 0 NOT NULL,
    next_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    done_at TIMESTAMP WITH TIME ZONE,
    error TEXT,
    CONSTRAINT pk_outbox PRIMARY KEY (id),
    CONSTRAINT uq_outbox_topic_dedupe_key UNIQUE (topic, dedupe_key)
);
CREATE INDEX ix_outbox_topic_next_at ON outbox (topic, next_at) WHERE done_at is null;

GRANT SELECT, INSERT, UPDATE ON projects TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO loraplex_app;
"""

DROP = """
DROP TABLE outbox;
ALTER TABLE ledger DROP COLUMN project_id;
ALTER TABLE requests DROP COLUMN project_id;
ALTER TABLE api_keys DROP CONSTRAINT fk_api_keys_own_project;
ALTER TABLE api_keys DROP COLUMN project_id;
DROP TABLE projects;
"""


def upgrade() -> None:
    run_sql(TABLES)


def downgrade() -> None:
    run_sql(DROP)
