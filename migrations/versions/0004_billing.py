"""Price books with dates and targets, rollups, invoices, credits.

Revision: 0004, after 0003.
"""

from __future__ import annotations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
