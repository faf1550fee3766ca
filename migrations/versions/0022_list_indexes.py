"""Indexes for what lists are filtered by: keys by a piece of their name, the audit log by
each of its fields; and the count of live keys.

Concurrently, so that nobody waits who writes meanwhile, and therefore outside a transaction. Whatever was
left of an attempt that failed is dropped first: a database that stopped half-way is migrated again.

Revision: 0022, after 0021.
"""

from __future__ import annotations

from alembic import op
from loraplex_platform.db.migration_sql import run_sql

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

# Audit's end with the id, by which lists are ordered. Actions are compared by their bytes, for one can be
# asked for by its beginning, which is a range only in that order.
INDEXES = {
    # By bytes, which sort many times faster than words of a language.
    "ix_api_keys_pieces": (
        'api_keys USING gin ((loraplex_key_pieces(tenant_id, name, public_id)) COLLATE "C")'
    ),
    # A sixth of the next smallest, for most keys have no end: the overview counts them all.
    "ix_api_keys_expires_at_active": "api_keys (expires_at) WHERE status = 'active'",
    "ix_audit_log_action_id": 'audit_log (action COLLATE "C", id)',
    "ix_audit_log_actor_id_id": "audit_log (actor_id, id)",
    "ix_audit_log_object_kind_id": "audit_log (object_kind, id)",
    "ix_audit_log_object_id_id": "audit_log (object_id, id)",
    "ix_audit_log_request_id_id": "audit_log (request_id, id)",
}


def _drop() -> None:
    run_sql(*(f"DROP INDEX CONCURRENTLY IF EXISTS {name}" for name in INDEXES))


def upgrade() -> None:
    with op.get_context().autocommit_block():
        _drop()
        run_sql(*(f"CREATE INDEX CONCURRENTLY {name} ON {on}" for name, on in INDEXES.items()))
        # The planner's statistics of an index on an expression begin with this.
        run_sql("ANALYZE api_keys")


def downgrade() -> None:
    with op.get_context().autocommit_block():
        _drop()
