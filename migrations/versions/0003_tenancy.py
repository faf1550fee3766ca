"""Members and roles, key life cycle and grants, row-level security.

Revision: 0003, after 0002.
"""

from __future__ import annotations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
