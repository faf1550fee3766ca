"""All that a stack keeps, as text, to look for what must not be in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import redis
from psycopg import sql


def database_texts(db_url: str) -> Iterator[str]:
    """Every column of every row of every table."""
    with psycopg.connect(db_url) as connection:
        tables = connection.execute("select tablename from pg_tables where schemaname = 'public'")
        for (table,) in tables.fetchall():
            query: Any = sql.SQL("select t::text from {} t").format(sql.Identifier(table))
            for (row,) in connection.execute(query):
                yield row


def redis_texts(redis_url: str) -> Iterator[str]:
    """Every key and every value, of whatever type."""
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter(count=1000):
            yield key.decode("utf-8", "replace")
            kind = client.type(key)
            value: Any
            if kind == b"string":
                value = client.get(key)
            elif kind == b"hash":
                value = client.hgetall(key)
            elif kind == b"list":
                value = client.lrange(key, 0, -1)
            elif kind == b"set":
                value = client.smembers(key)
            elif kind == b"zset":
                value = client.zrange(key, 0, -1, withscores=True)
            else:
                value = client.xrange(key)
            yield repr(value)
