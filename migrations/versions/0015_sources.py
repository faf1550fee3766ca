"""Adapters on their way in: resumable uploads and imports.

Revision: 0015, after 0014.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE adapter_uploads (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    is_probed BOOLEAN NOT NULL,
    tokenizer_sha256 VARCHAR(64),
    chat_template_sha256 VARCHAR(64),
    files JSONB NOT NULL,
    state VARCHAR(16) DEFAULT 'open' NOT NULL,
    version_id UUID,
    error JSONB,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_adapter_uploads PRIMARY KEY (id),
    CONSTRAINT ck_adapter_uploads_state CHECK (state in ('open', 'completed', 'refused')),
    CONSTRAINT ck_adapter_uploads_completed CHECK ((state = 'completed') = (version_id is not null)),
    CONSTRAINT ck_adapter_uploads_refused CHECK ((state = 'refused') = (error is not null)),
    CONSTRAINT fk_adapter_uploads_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_adapter_uploads_version_id_adapter_versions FOREIGN KEY (version_id)
        REFERENCES adapter_versions (id)
);
CREATE INDEX ix_adapter_uploads_tenant_id_id ON adapter_uploads (tenant_id, id);
CREATE INDEX ix_adapter_uploads_expires_at ON adapter_uploads (expires_at);

CREATE TABLE adapter_imports (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(80) NOT NULL,
    source VARCHAR(1000) NOT NULL,
    resolved VARCHAR(1000),
    is_probed BOOLEAN NOT NULL,
    state VARCHAR(16) DEFAULT 'queued' NOT NULL,
    received_bytes BIGINT DEFAULT 0 NOT NULL,
    total_bytes BIGINT,
    attempts INTEGER DEFAULT 0 NOT NULL,
    next_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    lease_token UUID,
    lease_until TIMESTAMP WITH TIME ZONE,
    version_id UUID,
    error JSONB,
    actor_kind VARCHAR(16) NOT NULL,
    actor_id VARCHAR(64),
    request_id VARCHAR(64),
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    finished_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_adapter_imports PRIMARY KEY (id),
    CONSTRAINT ck_adapter_imports_state CHECK (state in ('queued', 'running', 'succeeded', 'failed')),
    CONSTRAINT ck_adapter_imports_succeeded CHECK ((state = 'succeeded') = (version_id is not null)),
    CONSTRAINT ck_adapter_imports_running CHECK ((state = 'running') = (lease_token is not null)),
    CONSTRAINT ck_adapter_imports_leased CHECK ((state = 'running') = (lease_until is not null)),
    CONSTRAINT fk_adapter_imports_tenant_id_tenants FOREIGN KEY (tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_adapter_imports_version_id_adapter_versions FOREIGN KEY (version_id)
        REFERENCES adapter_versions (id)
);
CREATE INDEX ix_adapter_imports_tenant_id_id ON adapter_imports (tenant_id, id);
CREATE INDEX ix_adapter_imports_next_at ON adapter_imports (next_at) WHERE state in ('queued', 'running');

GRANT SELECT, INSERT, UPDATE, DELETE ON adapter_uploads, adapter_imports TO loraplex_app;
SELECT loraplex_guard_tenant_table('adapter_uploads');
SELECT loraplex_guard_tenant_table('adapter_imports');
-- What a member's own request writes; the jobs themselves run with the platform's rights.
GRANT INSERT, UPDATE (state, version_id, error, expires_at), DELETE ON adapter_uploads TO loraplex_tenant;
GRANT INSERT ON adapter_imports TO loraplex_tenant;
"""


def upgrade() -> None:
    """Make the tables."""
    run_sql(TABLES)


def downgrade() -> None:
    """Take them away; the bytes of unfinished uploads are swept from the quarantine."""
    run_sql("DROP TABLE adapter_imports; DROP TABLE adapter_uploads;")
