"""What the playground takes."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from loraplex_platform.control.schemas import Body

MAX_MESSAGES = 64
MAX_CONTENT_CHARS = 32_768


class PlaygroundMessage(Body):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str = Field(max_length=MAX_CONTENT_CHARS)


class PlaygroundRequest(Body):
    """A chat, streamed."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "model": "capitals",
                    "messages": [{"role": "user", "content": "What is the capital of France?"}],
                    "max_tokens": 64,
                    "temperature": 0,
                }
            ]
        },
    )

    model: str = Field(min_length=1, max_length=128, description="One of the tenant's model ids.")
    revision_id: str | None = Field(
        default=None,
        max_length=80,
        description="One of the model id's revisions, `rev_...`; null: what answers its clients now.",
    )
    messages: list[PlaygroundMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(default=128, ge=1, le=4096)
    temperature: float = Field(default=0.7, ge=0, le=2)
