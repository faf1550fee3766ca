"""The schema, as SQLAlchemy 2 typed models. Postgres is the only truth (DESIGN.md 4)."""

from loraplex_platform.db.audit import (
    AuditHead,
    AuditLog,
    DroppedMonth,
    IdempotencyRecord,
    InvariantRun,
    RetentionSetting,
)
from loraplex_platform.db.base import Base
from loraplex_platform.db.billing import (
    AdapterHoursProgress,
    BillingProfile,
    Invoice,
    InvoiceLine,
    InvoiceSeries,
    LedgerEntry,
    LedgerReversal,
    PriceBook,
    PriceItem,
    UsageDaily,
)
from loraplex_platform.db.evals import (
    EvalResult,
    EvalRun,
    EvalSchedule,
    EvalSuite,
    EvalSuiteVersion,
)
from loraplex_platform.db.fleet import EngineUsage, Gateway, JournalCursor, Replica
from loraplex_platform.db.metering import Attempt, Request
from loraplex_platform.db.outbox import OutboxMessage
from loraplex_platform.db.quotas import (
    AlertFired,
    Limit,
    QuotaWindow,
    Refusal,
    SharedLimitsVersion,
)
from loraplex_platform.db.registry import (
    Adapter,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentEvent,
    DeploymentRevision,
)
from loraplex_platform.db.retries import IdempotentRequest
from loraplex_platform.db.sources import AdapterImport, AdapterUpload
from loraplex_platform.db.tenancy import (
    ApiKey,
    ApiKeySecret,
    Invitation,
    KeyModelGrant,
    LoginThrottle,
    Membership,
    Project,
    Session,
    Tenant,
    User,
)
from loraplex_platform.db.webhooks import Webhook, WebhookDelivery

__all__ = [
    "Adapter",
    "AdapterHoursProgress",
    "AdapterImport",
    "AdapterUpload",
    "AdapterVersion",
    "AlertFired",
    "ApiKey",
    "ApiKeySecret",
    "Attempt",
    "AuditHead",
    "AuditLog",
    "Base",
    "BaseModel",
    "BillingProfile",
    "Deployment",
    "DeploymentEvent",
    "DeploymentRevision",
    "DroppedMonth",
    "EngineUsage",
    "EvalResult",
    "EvalRun",
    "EvalSchedule",
    "EvalSuite",
    "EvalSuiteVersion",
    "Gateway",
    "IdempotencyRecord",
    "IdempotentRequest",
    "InvariantRun",
    "Invitation",
    "Invoice",
    "InvoiceLine",
    "InvoiceSeries",
    "JournalCursor",
    "KeyModelGrant",
    "LedgerEntry",
    "LedgerReversal",
    "Limit",
    "LoginThrottle",
    "Membership",
    "OutboxMessage",
    "PriceBook",
    "PriceItem",
    "Project",
    "QuotaWindow",
    "Refusal",
    "Replica",
    "Request",
    "RetentionSetting",
    "Session",
    "SharedLimitsVersion",
    "Tenant",
    "UsageDaily",
    "User",
    "Webhook",
    "WebhookDelivery",
]
