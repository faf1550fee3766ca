"""Eval suites and their immutable versions, runs with one result a case, and schedules."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from loraplex_platform.db.base import Base, BigInt, Json


class EvalSuite(Base):
    """A named line of versions. `tenant_id` null: the platform's own, which every tenant may run."""

    __tablename__ = "eval_suites"
    __table_args__ = (
        CheckConstraint("kind in ('checks', 'performance')", name="kind"),
        Index(
            "uq_eval_suites_tenant_id_name",
            "tenant_id",
            "name",
            unique=True,
            postgresql_where=text("archived_at is null"),
        ),
        Index(
            "uq_eval_suites_platform_name",
            "name",
            unique=True,
            postgresql_where=text("tenant_id is null and archived_at is null"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(128))
    kind: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    archived_at: Mapped[datetime | None]


class EvalSuiteVersion(Base):
    """Immutable: `content` is canonical JSON (cases, thresholds), and `sha256` is of those bytes."""

    __tablename__ = "eval_suite_versions"
    __table_args__ = (
        UniqueConstraint("suite_id", "number"),
        UniqueConstraint("suite_id", "sha256"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID | None]  # its suite's
    suite_id: Mapped[UUID] = mapped_column(ForeignKey("eval_suites.id", ondelete="CASCADE"))
    number: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    num_cases: Mapped[int]
    content: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class EvalRun(Base):
    """A suite version asked of one immutable revision.

    queued -> running -> passed | failed | error | timeout | cancelled. `lease_token` fences: whoever
    holds the current value may write results; another worker takes an expired lease over by raising it.
    """

    __tablename__ = "eval_runs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "id"),
        CheckConstraint(
            "state in ('queued', 'running', 'passed', 'failed', 'error', 'timeout', 'cancelled')",
            name="state",
        ),
        CheckConstraint("(state in ('queued', 'running')) = (ended_at is null)", name="ended_at"),
        Index("ix_eval_runs_tenant_id_id", "tenant_id", "id"),
        Index(
            "ix_eval_runs_lease_until",
            "lease_until",
            postgresql_where=text("state in ('queued', 'running')"),
        ),
        Index("ix_eval_runs_suite_version_id_revision_id", "suite_version_id", "revision_id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    suite_version_id: Mapped[UUID] = mapped_column(ForeignKey("eval_suite_versions.id"))
    deployment_id: Mapped[UUID]
    revision_id: Mapped[UUID] = mapped_column(ForeignKey("deployment_revisions.id"))
    baseline_revision_id: Mapped[UUID | None] = mapped_column(ForeignKey("deployment_revisions.id"))
    schedule_id: Mapped[UUID | None]
    options: Mapped[Json]  # evals.records.RunOptions
    state: Mapped[str] = mapped_column(String(16), server_default="queued")
    lease_token: Mapped[BigInt] = mapped_column(server_default=text("0"))
    lease_until: Mapped[datetime | None]
    owner: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    num_cases: Mapped[int]
    score: Mapped[float | None]  # share of the cases' weights that passed, 0 to 1
    summary: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    fingerprints: Mapped[list[str]] = mapped_column(ARRAY(String(128)), server_default="{}")
    error: Mapped[str | None]  # in words, where it ended for another reason than its cases


class EvalResult(Base):
    """What became of one case: golden prompts are the suite owner's own, so outputs are kept."""

    __tablename__ = "eval_results"
    __table_args__ = (
        UniqueConstraint("run_id", "case_index"),
        ForeignKeyConstraint(
            ["tenant_id", "run_id"],
            ["eval_runs.tenant_id", "eval_runs.id"],
            ondelete="CASCADE",
            name="fk_eval_results_own_run",
        ),
        CheckConstraint("status in ('pass', 'fail', 'error', 'timeout')", name="status"),
        Index("ix_eval_results_run_id_id", "run_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    run_id: Mapped[UUID]
    tenant_id: Mapped[UUID]
    case_index: Mapped[int]
    case_id: Mapped[str] = mapped_column(String(128))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str]
    checks: Mapped[Json]  # {"checks": [{type, status, reason}, ...]}
    output: Mapped[str | None]
    baseline_output: Mapped[str | None]
    bits_sha256: Mapped[str | None] = mapped_column(String(64))  # token ids and log-probabilities
    mean_logprob: Mapped[float | None]
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    ttft_ms: Mapped[float | None]
    e2e_ms: Mapped[float | None]
    fingerprint: Mapped[str | None] = mapped_column(String(128))
    build_sha256: Mapped[str | None] = mapped_column(String(64))  # whose bits must not change
    replica_id: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[UUID | None]
    recorded_at: Mapped[datetime] = mapped_column(server_default=func.now())


class EvalSchedule(Base):
    """When a suite is run by itself: a cron expression in a zone, or every so many hours."""

    __tablename__ = "eval_schedules"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        CheckConstraint("(cron is null) <> (every_hours is null)", name="one_rule"),
        CheckConstraint("(deployment is null) <> (revision_id is null)", name="one_target"),
        CheckConstraint("every_hours between 1 and 8784", name="every_hours"),
        Index("ix_eval_schedules_next_at", "next_at", postgresql_where=text("is_enabled")),
        Index("ix_eval_schedules_tenant_id_id", "tenant_id", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(128))
    suite_id: Mapped[UUID] = mapped_column(ForeignKey("eval_suites.id"))
    suite_version: Mapped[int | None]  # null: the newest at that time
    deployment: Mapped[str | None] = mapped_column(String(128))  # its current revision at that time
    revision_id: Mapped[UUID | None] = mapped_column(ForeignKey("deployment_revisions.id"))
    baseline_revision_id: Mapped[UUID | None] = mapped_column(ForeignKey("deployment_revisions.id"))
    cron: Mapped[str | None] = mapped_column(String(128))
    every_hours: Mapped[int | None]
    zone: Mapped[str] = mapped_column(String(64))
    options: Mapped[Json]
    is_enabled: Mapped[bool] = mapped_column(server_default=text("true"))
    next_at: Mapped[datetime]
    last_run_id: Mapped[UUID | None]
    last_error: Mapped[str | None]  # why the last time made no run
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    row_version: Mapped[int] = mapped_column(server_default=text("1"))
