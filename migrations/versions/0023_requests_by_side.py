"""An index for requests by the side of a rollout that answered them: of five million none was found in a second.

Only of those that are no ordinary answer, so that it costs an ordinary one nothing. The parent's index is there
first, without its parts, so that a partition that is made meanwhile has its own; then one partition after the
other, beside all traffic. A migration that stopped half-way goes on where it was.

Revision: 0023, after 0022.
"""

from __future__ import annotations

from alembic import op
from loraplex_platform.db.migration_sql import run_sql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

INDEX = "ix_requests_arm_id"
BODY = "(arm, id) WHERE arm <> 'stable'"
# Partitions without their part of it, and what that is to be called.
MISSING = f"""
SELECT p.inhrelid::regclass::text, quote_ident(c.relname || '_arm_id_idx')
FROM pg_inherits p JOIN pg_class c ON c.oid = p.inhrelid
WHERE p.inhparent = 'requests'::regclass AND NOT EXISTS (
    SELECT FROM pg_inherits i JOIN pg_index x ON x.indexrelid = i.inhrelid
    WHERE i.inhparent = '{INDEX}'::regclass AND x.indrelid = p.inhrelid)
"""


def upgrade() -> None:
    run_sql(f"CREATE INDEX IF NOT EXISTS {INDEX} ON ONLY requests {BODY}")
    with op.get_context().autocommit_block():
        for partition, name in op.get_bind().exec_driver_sql(MISSING).all():
            run_sql(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
            run_sql(f"CREATE INDEX CONCURRENTLY {name} ON {partition} {BODY}")
            run_sql(f"ALTER INDEX {INDEX} ATTACH PARTITION {name}")


def downgrade() -> None:
    run_sql(f"DROP INDEX {INDEX}")
