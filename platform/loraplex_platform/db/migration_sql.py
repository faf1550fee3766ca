"""How a migration runs SQL: as it is written, with the schema's name filled in."""

from __future__ import annotations

from typing import cast

import psycopg
from alembic import op


def run_sql(*scripts: str) -> None:
    """Run scripts of several statements each; `@@SCHEMA@@` stands for the quoted name of the schema."""
    connection = op.get_bind()
    schema = connection.exec_driver_sql("SELECT quote_ident(current_schema())").scalar_one()
    driver = cast(psycopg.Connection, connection.connection.driver_connection)
    with driver.cursor() as cursor:
        for script in scripts:
            # The driver's own cursor, without parameters, leaves %, : and ; to Postgres.
            cursor.execute(script.replace("@@SCHEMA@@", schema).encode())
