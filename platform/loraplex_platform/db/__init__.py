"""The schema, as SQLAlchemy 2 typed models. Postgres is the only truth (DESIGN.md 4)."""

from loraplex_platform.db.audit import AuditLog, IdempotencyRecord
from loraplex_platform.db.base import Base
from loraplex_platform.db.billing import LedgerEntry, PriceBook, PriceItem
from loraplex_platform.db.fleet import EngineUsage, Gateway, JournalCursor, Replica
from loraplex_platform.db.metering import Attempt, Request
from loraplex_platform.db.outbox import OutboxMessage
from loraplex_platform.db.registry import (
    Adapter,
    AdapterVersion,
    BaseModel,
    Deployment,
    DeploymentRevision,
)
from loraplex_platform.db.retries import IdempotentRequest
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

__all__ = [
    "Adapter",
    "AdapterVersion",
    "ApiKey",
    "ApiKeySecret",
    "Attempt",
    "AuditLog",
    "Base",
    "BaseModel",
    "Deployment",
    "DeploymentRevision",
    "EngineUsage",
    "Gateway",
    "IdempotencyRecord",
    "IdempotentRequest",
    "Invitation",
    "JournalCursor",
    "KeyModelGrant",
    "LedgerEntry",
    "LoginThrottle",
    "Membership",
    "OutboxMessage",
    "PriceBook",
    "PriceItem",
    "Project",
    "Replica",
    "Request",
    "Session",
    "Tenant",
    "User",
]
