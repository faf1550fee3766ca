"""What the mirrors and rates in Redis are rebuilt from.

Revision: 0006, after 0005.
"""

from __future__ import annotations

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
