"""Limits a minute that gateways share, bytes of services, and where the ledger may have gaps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"

_BYTES = ("bytes_in", "bytes_out")


def upgrade() -> None:
    """Add columns and tables; what was used before has no bytes."""
    for name in _BYTES:
        op.add_column(
            "operations",
            sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0")),
        )
    op.create_table(
        "gateways",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("seen_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "rate_buckets",
        sa.Column("key_id", sa.String(12), primary_key=True),
        sa.Column("what", sa.String(16), primary_key=True),
        sa.Column("level", sa.Float(53), nullable=False),
        sa.Column("at_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "rate_leases",
        sa.Column("key_id", sa.String(12), primary_key=True),
        sa.Column("what", sa.String(16), primary_key=True),
        sa.Column("gateway", sa.String(32), primary_key=True),
        sa.Column("lent", sa.Float(53), nullable=False),
        sa.Column("expires_s", sa.Float(53), nullable=False),
        sa.Column("served_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "ledger_gaps",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("since_s", sa.Float(53), nullable=False),
        sa.Column("until_s", sa.Float(53)),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("lost", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Remove them, and what they say."""
    for table in ("ledger_gaps", "rate_leases", "rate_buckets", "gateways"):
        op.drop_table(table)
    for name in _BYTES:
        op.drop_column("operations", name)
