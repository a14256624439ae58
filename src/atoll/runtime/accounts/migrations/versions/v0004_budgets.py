"""Budgets that are set while gateways run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "budgets",
        sa.Column("id", sa.String(140), primary_key=True),
        sa.Column("spec", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Remove it, and what it says."""
    op.drop_table("budgets")
