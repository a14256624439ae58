"""The tables. A change here needs a migration beside it (`migrations/versions`) and a new HEAD."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)

HEAD = "0002"
"""The migration that makes these tables."""

metadata = MetaData()


def _media() -> tuple[Column[int], ...]:
    """Return the columns of sound (heard, spoken; milliseconds) and pictures (seen or drawn)."""
    names = ("audio_ms", "speech_ms", "image_pixels")
    return tuple(Column(n, BigInteger, nullable=False, server_default=text("0")) for n in names)


keys = Table(
    "api_keys",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("spec", Text, nullable=False),  # NewKey as JSON; name and owner are copies for joins
    Column("created_s", Float(53), nullable=False),
    Column("revoked_s", Float(53)),
    Column("version", BigInteger, nullable=False),
    Index("api_keys_version", "version"),
)

versions = Table(
    # One row, raised with every change of a key.
    "key_versions",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
)

operations = Table(
    # One row a request of a client.
    "operations",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("key_id", String(12)),
    Column("model", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("status", Integer, nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("cost_nusd", BigInteger, nullable=False),  # 1e-9 US dollars
    Column("started_s", Float(53), nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("first_token_s", Float(53)),
    Column("day", String(10), nullable=False),  # UTC, in which it ended
    *_media(),
    Index("operations_day", "day"),
    Index("operations_key", "key_id", "day"),
)

attempts = Table(
    # One row a backend that worked on a request; their tokens add up to the operation's.
    "attempts",
    metadata,
    Column("operation_id", String(32), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("backend", Text, nullable=False),
    Column("node", Text),
    Column("provider", Text),
    Column("prompt_tokens", BigInteger, nullable=False),  # of one attempt only
    Column("completion_tokens", BigInteger, nullable=False),
    Column("seconds", Float(53), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("cost_nusd", BigInteger, nullable=False),
    *_media(),
)

counters = Table(
    # What a key used by period: a day, a month, or "total".
    "token_counters",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("period", String(10), primary_key=True),
    Column("tokens", BigInteger, nullable=False),
    Column("audio_ms", BigInteger, nullable=False, server_default=text("0")),  # heard and spoken
    Column("pixels", BigInteger, nullable=False, server_default=text("0")),
)

segments = Table(
    # Parts of journals that are in the tables above, until their files are gone.
    "journal_segments",
    metadata,
    Column("name", String(64), primary_key=True),
)
