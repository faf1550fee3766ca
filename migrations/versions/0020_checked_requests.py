"""The rows that were there when requests got new checks are looked at, beside all traffic.

A migration of its own: whatever adds or drops a constraint locks the table until its transaction ends, and this
reads every partition. Alone it keeps nobody from reading or writing.

Revision: 0020, after 0019.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

VALIDATE = """
ALTER TABLE requests VALIDATE CONSTRAINT ck_requests_kind;
ALTER TABLE requests VALIDATE CONSTRAINT ck_requests_arm;
"""


def upgrade() -> None:
    run_sql(VALIDATE)


def downgrade() -> None:
    pass
