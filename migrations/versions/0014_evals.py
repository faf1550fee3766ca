"""Eval suites, runs, results and schedules.

Revision: 0014, after 0013.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE eval_suites (
    id UUID NOT NULL,
    tenant_id UUID,
    name VARCHAR(128) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    archived_at TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_eval_suites PRIMARY KEY (id),
    CONSTRAINT ck_eval_suites_kind CHECK (kind in ('checks', 'performance')),
    CONSTRAINT fk_eval_suites_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE UNIQUE INDEX uq_eval_suites_platform_name ON eval_suites (name) WHERE tenant_id is null and archived_at is null;
CREATE UNIQUE INDEX uq_eval_suites_tenant_id_name ON eval_suites (tenant_id, name) WHERE archived_at is null;

CREATE TABLE eval_suite_versions (
    id UUID NOT NULL,
    tenant_id UUID,
    suite_id UUID NOT NULL,
    number INTEGER NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    num_cases INTEGER NOT NULL,
    content TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_eval_suite_versions PRIMARY KEY (id),
    CONSTRAINT uq_eval_suite_versions_suite_id_number UNIQUE (suite_id, number),
    CONSTRAINT uq_eval_suite_versions_suite_id_sha256 UNIQUE (suite_id, sha256),
    CONSTRAINT fk_eval_suite_versions_suite_id_eval_suites FOREIGN KEY(suite_id) REFERENCES eval_suites (id) ON DELETE CASCADE
);

CREATE TABLE eval_runs (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    suite_version_id UUID NOT NULL,
    deployment_id UUID NOT NULL,
    revision_id UUID NOT NULL,
    baseline_revision_id UUID,
    schedule_id UUID,
    options JSONB NOT NULL,
    state VARCHAR(16) DEFAULT 'queued' NOT NULL,
    lease_token BIGINT DEFAULT 0 NOT NULL,
    lease_until TIMESTAMP WITH TIME ZONE,
    owner VARCHAR(64),
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    cancel_requested_at TIMESTAMP WITH TIME ZONE,
    num_cases INTEGER NOT NULL,
    score DOUBLE PRECISION,
    summary JSONB DEFAULT '{}' NOT NULL,
    fingerprints VARCHAR(128)[] DEFAULT '{}' NOT NULL,
    error TEXT,
    CONSTRAINT pk_eval_runs PRIMARY KEY (id),
    CONSTRAINT uq_eval_runs_tenant_id_id UNIQUE (tenant_id, id),
    CONSTRAINT ck_eval_runs_state CHECK (state in ('queued', 'running', 'passed', 'failed', 'error', 'timeout', 'cancelled')),
    CONSTRAINT ck_eval_runs_ended_at CHECK ((state in ('queued', 'running')) = (ended_at is null)),
    CONSTRAINT fk_eval_runs_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_eval_runs_suite_version_id_eval_suite_versions FOREIGN KEY(suite_version_id) REFERENCES eval_suite_versions (id),
    CONSTRAINT fk_eval_runs_revision_id_deployment_revisions FOREIGN KEY(revision_id) REFERENCES deployment_revisions (id),
    CONSTRAINT fk_eval_runs_baseline_revision_id_deployment_revisions FOREIGN KEY(baseline_revision_id) REFERENCES deployment_revisions (id)
);
CREATE INDEX ix_eval_runs_lease_until ON eval_runs (lease_until) WHERE state in ('queued', 'running');
CREATE INDEX ix_eval_runs_suite_version_id_revision_id ON eval_runs (suite_version_id, revision_id);
CREATE INDEX ix_eval_runs_tenant_id_id ON eval_runs (tenant_id, id);

CREATE TABLE eval_results (
    id UUID NOT NULL,
    run_id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    case_index INTEGER NOT NULL,
    case_id VARCHAR(128) NOT NULL,
    status VARCHAR(16) NOT NULL,
    reason TEXT NOT NULL,
    checks JSONB NOT NULL,
    output TEXT,
    baseline_output TEXT,
    bits_sha256 VARCHAR(64),
    mean_logprob DOUBLE PRECISION,
    prompt_tokens INTEGER,
    completion_tokens INTEGER,
    finish_reason VARCHAR(16),
    ttft_ms DOUBLE PRECISION,
    e2e_ms DOUBLE PRECISION,
    fingerprint VARCHAR(128),
    build_sha256 VARCHAR(64),
    replica_id VARCHAR(64),
    request_id UUID,
    recorded_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_eval_results PRIMARY KEY (id),
    CONSTRAINT uq_eval_results_run_id_case_index UNIQUE (run_id, case_index),
    CONSTRAINT fk_eval_results_own_run FOREIGN KEY(tenant_id, run_id) REFERENCES eval_runs (tenant_id, id) ON DELETE CASCADE,
    CONSTRAINT ck_eval_results_status CHECK (status in ('pass', 'fail', 'error', 'timeout'))
);
CREATE INDEX ix_eval_results_run_id_id ON eval_results (run_id, id);

CREATE TABLE eval_schedules (
    id UUID NOT NULL,
    tenant_id UUID NOT NULL,
    name VARCHAR(128) NOT NULL,
    suite_id UUID NOT NULL,
    suite_version INTEGER,
    deployment VARCHAR(128),
    revision_id UUID,
    baseline_revision_id UUID,
    cron VARCHAR(128),
    every_hours INTEGER,
    zone VARCHAR(64) NOT NULL,
    options JSONB NOT NULL,
    is_enabled BOOLEAN DEFAULT true NOT NULL,
    next_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_run_id UUID,
    last_error TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    row_version INTEGER DEFAULT 1 NOT NULL,
    CONSTRAINT pk_eval_schedules PRIMARY KEY (id),
    CONSTRAINT uq_eval_schedules_tenant_id_name UNIQUE (tenant_id, name),
    CONSTRAINT ck_eval_schedules_one_rule CHECK ((cron is null) <> (every_hours is null)),
    CONSTRAINT ck_eval_schedules_one_target CHECK ((deployment is null) <> (revision_id is null)),
    CONSTRAINT ck_eval_schedules_every_hours CHECK (every_hours between 1 and 8784),
    CONSTRAINT fk_eval_schedules_tenant_id_tenants FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    CONSTRAINT fk_eval_schedules_suite_id_eval_suites FOREIGN KEY(suite_id) REFERENCES eval_suites (id),
    CONSTRAINT fk_eval_schedules_revision_id_deployment_revisions FOREIGN KEY(revision_id) REFERENCES deployment_revisions (id),
    CONSTRAINT fk_eval_schedules_baseline_revision_id_deployment_revisions FOREIGN KEY(baseline_revision_id) REFERENCES deployment_revisions (id)
);
CREATE INDEX ix_eval_schedules_next_at ON eval_schedules (next_at) WHERE is_enabled;
CREATE INDEX ix_eval_schedules_tenant_id_id ON eval_schedules (tenant_id, id);

"""

RIGHTS = """
-- A version never changes; what is deleted is a deleted tenant's.
GRANT SELECT, INSERT, DELETE ON eval_suite_versions TO loraplex_app;
GRANT SELECT, INSERT, UPDATE, DELETE ON eval_suites, eval_runs, eval_results, eval_schedules
    TO loraplex_app;

SELECT loraplex_guard_tenant_table('eval_suites');
SELECT loraplex_guard_tenant_table('eval_suite_versions');
SELECT loraplex_guard_tenant_table('eval_runs');
SELECT loraplex_guard_tenant_table('eval_results');
SELECT loraplex_guard_tenant_table('eval_schedules');

-- The platform's suites are everybody's to run.
CREATE POLICY platforms_own ON eval_suites FOR SELECT TO loraplex_tenant USING (tenant_id IS NULL);
CREATE POLICY platforms_own ON eval_suite_versions FOR SELECT TO loraplex_tenant
    USING (tenant_id IS NULL);

-- What a member's request may write. Results are the worker's alone.
GRANT INSERT, UPDATE (archived_at) ON eval_suites TO loraplex_tenant;
GRANT INSERT ON eval_suite_versions TO loraplex_tenant;
GRANT INSERT, UPDATE (state, ended_at, cancel_requested_at, error) ON eval_runs TO loraplex_tenant;
GRANT INSERT, UPDATE, DELETE ON eval_schedules TO loraplex_tenant;
"""

DROP = """
DROP TABLE eval_schedules, eval_results, eval_runs, eval_suite_versions, eval_suites;
"""


def upgrade() -> None:
    run_sql(TABLES, RIGHTS)


def downgrade() -> None:
    run_sql(DROP)
