"""Alembic's entry: runs on the connection that db/migrate.py hands over, else on the settings' URL."""

from __future__ import annotations

from alembic import context
from loraplex_platform.db import Base
from loraplex_platform.db.migrate import include_name
from loraplex_platform.settings import DatabaseSettings
from sqlalchemy import Connection, create_engine, pool


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_name=include_name,
        compare_server_default=True,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    engine = create_engine(
        DatabaseSettings().sqlalchemy_url(),  # type: ignore[call-arg] # filled from the environment
        poolclass=pool.NullPool,
    )
    with engine.begin() as own:
        run(own)
