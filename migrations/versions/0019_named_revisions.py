"""A request may say which revision answers it, where the console's playground asks: its arm is `named`.

Revision: 0019, after 0018.
"""

from __future__ import annotations

from loraplex_platform.db.migration_sql import run_sql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

ARMS = """
ALTER TABLE requests
    DROP CONSTRAINT ck_requests_arm,
    ADD CONSTRAINT ck_requests_arm CHECK (arm in ({arms})) NOT VALID;
"""
VALIDATE = "ALTER TABLE requests VALIDATE CONSTRAINT ck_requests_arm;"
BEFORE = "'stable', 'canary', 'shadow', 'pinned'"


def upgrade() -> None:
    run_sql(ARMS.format(arms=f"{BEFORE}, 'named'"))  # 0020 validates it


def downgrade() -> None:
    # It was no side of a rollout either way.
    run_sql("UPDATE requests SET arm = 'pinned' WHERE arm = 'named';")
    run_sql(ARMS.format(arms=BEFORE), VALIDATE)
