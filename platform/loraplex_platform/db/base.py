"""What every table shares: constraint names, and Python types mapped to Postgres types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, MetaData, Numeric, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

# Exact pico-USD: tokens x micro-USD per 1M tokens. 30 digits leave room for any sum.
Pico = Annotated[int, mapped_column(Numeric(30, 0, asdecimal=True))]
BigInt = Annotated[int, mapped_column(BigInteger)]
Json = dict[str, Any]


class Base(DeclarativeBase):
    """Declarative base: every constraint has a predictable name, every time has a zone."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: DateTime(timezone=True),
        UUID: Uuid(as_uuid=True),
        str: Text,
        Json: JSONB,
    }
