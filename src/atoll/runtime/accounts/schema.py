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

HEAD = "0004"
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
    Column("bytes_in", BigInteger, nullable=False, server_default=text("0")),  # of services only
    Column("bytes_out", BigInteger, nullable=False, server_default=text("0")),
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

gateways = Table(
    # Gateways that use this database, and when they last did.
    "gateways",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("seen_s", Float(53), nullable=False),
)

buckets = Table(
    # What is left of a limit a minute, without what is lent to gateways.
    "rate_buckets",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("what", String(16), primary_key=True),  # requests, tokens
    Column("level", Float(53), nullable=False),
    Column("at_s", Float(53), nullable=False),
)

leases = Table(
    # What of it a gateway has taken ahead.
    "rate_leases",
    metadata,
    Column("key_id", String(12), primary_key=True),
    Column("what", String(16), primary_key=True),
    Column("gateway", String(32), primary_key=True),
    Column("lent", Float(53), nullable=False),
    Column("expires_s", Float(53), nullable=False),
    Column("served_s", Float(53), nullable=False),  # when it last got a whole request or token
)

gaps = Table(
    # Times in which a gateway could not write down what it served, and went on serving.
    "ledger_gaps",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("since_s", Float(53), nullable=False),
    Column("until_s", Float(53)),  # none: it has not ended, or its gateway died in it
    Column("requests", BigInteger, nullable=False),  # that nothing on the disk knew of as they ran
    Column("lost", BigInteger, nullable=False),  # that are not in the ledger
)

budgets = Table(
    # What may be spent a month before it is an alarm, as people set it while gateways run.
    "budgets",
    metadata,
    Column("id", String(140), primary_key=True),
    Column("spec", Text, nullable=False),  # BudgetSettings as JSON
)
