"""A small asynchronous chat client for `loraplex demo` and `loraplex verify`: no SDK, no retries.

Retries would hide what these commands are there to show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from loraplex_platform.cli.errors import CommandError
from loraplex_platform.local.demo_file import Target

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request, whole."""

    target: Target
    content: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    top_logprobs: int | None = None

    def body(self, *, is_streamed: bool) -> dict[str, Any]:
        """As the API takes it."""
        body: dict[str, Any] = {
            "model": self.target.model,
            "messages": [{"role": "user", "content": self.content}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.top_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `logprobs` is the API's own list, compared as it is."""

    text: str
    completion_tokens: int
    logprobs: Any = None


class ChatClient:
    """Talks to one gateway; a context."""

    def __init__(self, gateway_url: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=gateway_url,
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, question: Question) -> Answer:
        """One answer, not streamed.

        Raises:
            CommandError: the gateway refused or went away.
        """
        try:
            response = await self._http.post(
                "/v1/chat/completions",
                headers=_headers(question),
                json=question.body(is_streamed=False),
            )
        except httpx.TransportError as error:
            raise _gone(question, error) from error
        if response.is_error:
            raise _refused(question, response)
        content = response.json()
        choice = content["choices"][0]
        return Answer(
            choice["message"]["content"] or "",
            content["usage"]["completion_tokens"],
            choice.get("logprobs"),
        )

    async def stream(self, question: Question, on_text: Callable[[str], None]) -> Answer:
        """One answer, piece by piece.

        Raises:
            CommandError: as `ask`, and when the stream ends without `[DONE]`.
        """
        pieces: list[str] = []
        completion_tokens = 0
        is_done = False
        try:
            async with self._http.stream(
                "POST",
                "/v1/chat/completions",
                headers=_headers(question),
                json=question.body(is_streamed=True),
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise _refused(question, response)
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        is_done = True
                        break
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise CommandError(f"{question.target.label}: {chunk['error']['message']}")
                    for choice in chunk["choices"]:
                        piece = choice["delta"].get("content")
                        if piece:
                            pieces.append(piece)
                            on_text(piece)
                    if chunk.get("usage"):
                        completion_tokens = chunk["usage"]["completion_tokens"]
        except httpx.TransportError as error:
            raise _gone(question, error) from error
        if not is_done:
            raise CommandError(f"{question.target.label}: the stream ended early")
        return Answer("".join(pieces), completion_tokens)


def _headers(question: Question) -> dict[str, str]:
    return {"Authorization": f"Bearer {question.target.api_key}"}


def _refused(question: Question, response: httpx.Response) -> CommandError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code}"
    return CommandError(f"{question.target.label}: {message}")


def _gone(question: Question, error: Exception) -> CommandError:
    return CommandError(f"{question.target.label}: the gateway went away ({error!r})")
