"""Limits and quota windows; reserve and settle as one call each.

Revision: 0005, after 0004.
"""

from __future__ import annotations

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
