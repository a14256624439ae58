"""Sound and pictures beside tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"

_COLUMNS = {
    "operations": ("audio_ms", "speech_ms", "image_pixels"),
    "attempts": ("audio_ms", "speech_ms", "image_pixels"),
    "token_counters": ("audio_ms", "pixels"),
}


def upgrade() -> None:
    """Add the columns; what was used before has none of either."""
    for table, columns in _COLUMNS.items():
        for name in columns:
            op.add_column(
                table, sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))
            )


def downgrade() -> None:
    """Remove the columns, and what they say."""
    for table, columns in _COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)
