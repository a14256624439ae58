"""Keys, operations, attempts, counters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float(53), nullable=False),
        sa.Column("revoked_s", sa.Float(53)),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.create_index("api_keys_version", "api_keys", ["version"])
    versions = op.create_table(
        "key_versions",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(versions, [{"id": 1, "version": 0}])
    op.create_table(
        "operations",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.String(12)),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("estimated", sa.Boolean, nullable=False),
        sa.Column("cost_nusd", sa.BigInteger, nullable=False),
        sa.Column("started_s", sa.Float(53), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("first_token_s", sa.Float(53)),
        sa.Column("day", sa.String(10), nullable=False),
    )
    op.create_index("operations_day", "operations", ["day"])
    op.create_index("operations_key", "operations", ["key_id", "day"])
    op.create_table(
        "attempts",
        sa.Column("operation_id", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("node", sa.Text),
        sa.Column("provider", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("cost_nusd", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "token_counters",
        sa.Column("key_id", sa.String(12), primary_key=True),
        sa.Column("period", sa.String(10), primary_key=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "journal_segments",
        sa.Column("name", sa.String(64), primary_key=True),
    )


def downgrade() -> None:
    """Remove the tables."""
    for name in (
        "journal_segments",
        "token_counters",
        "attempts",
        "operations",
        "key_versions",
        "api_keys",
    ):
        op.drop_table(name)
