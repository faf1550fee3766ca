"""How a migration runs SQL: as it is written, with the schema's name filled in."""

from __future__ import annotations

from typing import cast

import psycopg
from alembic import op
from sqlalchemy import text

Edit = tuple[str, str]
"""A text that occurs exactly once, and what is to stand in its place."""


def run_sql(*scripts: str) -> None:
    """Run scripts of several statements each; `@@SCHEMA@@` stands for the quoted name of the schema."""
    connection = op.get_bind()
    schema = connection.exec_driver_sql("SELECT quote_ident(current_schema())").scalar_one()
    driver = cast(psycopg.Connection, connection.connection.driver_connection)
    with driver.cursor() as cursor:
        for script in scripts:
            # The driver's own cursor, without parameters, leaves %, : and ; to Postgres.
            cursor.execute(script.replace("@@SCHEMA@@", schema).encode())


def edit_function(name: str, *edits: Edit) -> None:
    """Change a long function where a migration changes it, instead of saying it all again.

    Undone by the same edits the other way round (`reverted`).

    Raises:
        LookupError: there is not exactly one function of this name, or a text is not there exactly once.
        ValueError: its parameters change, and it has rights of its own, which would be lost.
    """
    found = _functions(name)
    if len(found) > 1:
        raise LookupError(f"{len(found)} functions are called {name}")
    [(signature, rights, old)] = found
    new = old
    for old_text, new_text in edits:
        if new.count(old_text) != 1:
            raise LookupError(f"{name} has {new.count(old_text)} times, not once: {old_text}")
        new = new.replace(old_text, new_text)
    run_sql(new)
    if len(_functions(name)) > 1:  # other parameters make another function beside it
        if rights is not None:
            raise ValueError(f"{name} has rights of its own: {rights}")
        run_sql(f"DROP FUNCTION {signature}")


def _functions(name: str) -> list[tuple[str, str | None, str]]:
    """Signature, rights and definition of the functions of this name."""
    rows = op.get_bind().execute(
        text(
            "SELECT oid::regprocedure::text, proacl::text, pg_get_functiondef(oid) FROM pg_proc"
            " WHERE proname = :name AND pronamespace = current_schema()::regnamespace"
        ),
        {"name": name},
    )
    found = [(signature, rights, definition) for signature, rights, definition in rows]
    if not found:
        raise LookupError(f"no function is called {name}")
    return found


def reverted(*edits: Edit) -> tuple[Edit, ...]:
    """What undoes the edits."""
    return tuple((new_text, old_text) for old_text, new_text in reversed(edits))
