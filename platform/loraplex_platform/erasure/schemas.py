"""The deletion of a tenant on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from loraplex_platform.control.schemas import Resource


class Deletion(Resource):
    """What was removed of a tenant, and what was kept and why."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "object": "tenant_deletion",
                    "tenant_id": "ten_0197c5d2a1b27c3d8e4f5a6b7c8d9e0f",
                    "removed": {"api_keys": 3, "users": 1, "stored_answers": 12},
                    "adapter_files": 2,
                    "kept": ["audit log: it is append-only"],
                }
            ]
        }
    )

    object: Literal["tenant_deletion"] = "tenant_deletion"
    tenant_id: str
    removed: dict[str, int] = Field(
        description="How many of each kind were deleted or made nameless."
    )
    adapter_files: int = Field(
        description="Adapter versions whose files go from the store: at once, or within two hours if they "
        "were uploaded just now. Files that another tenant has uploaded too stay that one's."
    )
    kept: list[str]
