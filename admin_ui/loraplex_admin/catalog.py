"""Which pages there are, and what somebody must be allowed to do to see each: the one table.

Actions are the control API's own (`control/permissions.py` there); the API tells which ones a login has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from loraplex_admin.access import Access
from loraplex_admin.api import Api
from loraplex_admin.views import (
    adapters,
    alerts,
    audit,
    deployments,
    evals,
    fleet,
    invariants,
    invoices,
    keys,
    limits,
    members,
    models,
    overview,
    playground,
    prices,
    request_log,
    rollouts,
    settings,
    tenants,
    usage,
    webhooks,
)

Render = Callable[[Api, Access], None]


@dataclass(frozen=True, slots=True)
class Page:
    """One page. `path` is its address; what the first one shows that a reader may see is also at `/`."""

    section: str
    title: str
    path: str
    icon: str
    action: str
    render: Render


PAGES: Final = (
    Page("Fleet", "Overview", "overview", "monitoring", "fleet.read", overview.render),
    Page("Fleet", "Fleet", "fleet", "dns", "fleet.read", fleet.render),
    Page("Fleet", "Invariants", "invariants", "balance", "invariant.read", invariants.render),
    Page("Tenants", "Tenants", "tenants", "apartment", "tenant.read", tenants.render),
    Page("Tenants", "Members", "members", "group", "member.read", members.render),
    Page("Tenants", "API keys", "keys", "key", "key.read", keys.render),
    Page("Tenants", "Limits", "limits", "speed", "limit.read", limits.render),
    Page("Models", "Models", "models", "deployed_code", "model.read", models.render),
    Page("Models", "Adapters", "adapters", "layers", "adapter.read", adapters.render),
    Page(
        "Models",
        "Deployments",
        "deployments",
        "rocket_launch",
        "deployment.read",
        deployments.render,
    ),
    Page("Models", "Rollouts", "rollouts", "alt_route", "rollout.read", rollouts.render),
    Page("Models", "Evals", "evals", "fact_check", "eval.read", evals.render),
    Page("Models", "Playground", "playground", "forum", "playground.use", playground.render),
    Page("Money", "Usage", "usage", "bar_chart", "usage.read", usage.render),
    Page("Money", "Prices", "prices", "sell", "price.read", prices.render),
    Page("Money", "Invoices", "invoices", "receipt_long", "invoice.read", invoices.render),
    Page("Records", "Requests", "requests", "list_alt", "request.read", request_log.render),
    Page("Records", "Audit log", "audit", "history", "audit.read", audit.render),
    Page("Records", "Alerts", "alerts", "notifications", "alert.read", alerts.render),
    Page("Records", "Webhooks", "webhooks", "webhook", "webhook.read", webhooks.render),
    Page("Settings", "Settings", "settings", "settings", "session.read", settings.render),
)


def pages_for(access: Access) -> list[Page]:
    """What somebody sees, in the order of the sidebar."""
    return [page for page in PAGES if access.may(page.action)]
