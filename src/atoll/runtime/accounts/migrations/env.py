"""Run by alembic: applies the changes on the connection that `Database` gives it."""

from __future__ import annotations

from alembic import context

from atoll.runtime.accounts.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
