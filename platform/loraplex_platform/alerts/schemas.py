"""Alerts on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from loraplex_platform.alerts.words import Severity, severity_of, subjects_of, summary_of
from loraplex_platform.control.schemas import Resource, UnixSeconds
from loraplex_platform.db import Alert
from loraplex_platform.ids import format_id


class AlertSubject(Resource):
    """Something that an alert is about."""

    kind: str = Field(examples=["limit"])
    id: str = Field(examples=["lim_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f"])


class AlertResource(Resource):
    """Something that somebody should look at. Webhooks of the topic `alert` were told the same."""

    object: Literal["alert"] = "alert"
    id: str
    tenant_id: str | None = Field(description="null: it concerns the platform itself.")
    kind: str = Field(examples=["limit_threshold"])
    severity: Severity
    summary: str = Field(description="In words; times in the tenant's time zone.")
    subjects: list[AlertSubject]
    at: UnixSeconds


def show_alert(alert: Alert, zone: str) -> AlertResource:
    """The alert as the API shows it."""
    return AlertResource(
        id=format_id("alert", alert.id),
        tenant_id=None if alert.tenant_id is None else format_id("tenant", alert.tenant_id),
        kind=alert.kind,
        severity=severity_of(alert.kind, alert.payload),
        summary=summary_of(alert.kind, alert.payload, zone),
        subjects=[AlertSubject(kind=kind, id=id_) for kind, id_ in subjects_of(alert.payload)],
        at=alert.at,
    )
