"""Text to token ids, long ones off the event loop, and what the base model's folder says about its tokens.

Rules for special tokens (`<|im_end|>` written by a caller):
* chat: the caller's text never becomes a control token; it is encoded as the characters it is;
* completions: the prompt is the caller's own raw sequence, so special tokens in it are parsed, as
  transformers does and as a token array could say anyway.

Byte-level tokenizers only (Llama 3, Qwen, SmolLM): their text can be rebuilt byte by byte.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.detokenizer import TokenBytes
from loraplex_platform.gateway.errors import ContextLengthError, UnsupportedParameterError
from loraplex_platform.gateway.templates import ChatTemplate
from loraplex_platform.gateway.tool_formats.hermes import Hermes
from loraplex_platform.gateway.tool_formats.tool_format import ToolFormat
from loraplex_platform.settings import ToolFormatName

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_NUM_THREADS = 2
# So many characters, and messages, take less than handing them to a thread and waiting for it.
_SHORT = 1024
_FEW = 8
# A normalizer may shrink text before it is cut into tokens (NFKC, at most about so much).
_NORMALIZER_FACTOR = 8


class ModelFolderError(ValueError):
    """The model folder lacks a file or holds something the gateway cannot serve."""


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """The raw files of a model folder that the gateway needs."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> ModelTexts:
        """Read them.

        Raises:
            ModelFolderError: names the file that is missing or malformed.
        """
        chat_template = folder / "chat_template.jinja"
        tokenizer_config = _read_json(folder / "tokenizer_config.json", required=False)
        return cls(
            tokenizer_json=_read_text(folder / "tokenizer.json"),
            tokenizer_config=tokenizer_config,
            config=_read_json(folder / "config.json", required=True),
            generation_config=_read_json(folder / "generation_config.json", required=False),
            chat_template=(
                _read_text(chat_template)
                if chat_template.exists()
                else _inline_template(tokenizer_config.get("chat_template"))
            ),
        )


class BaseTokenizer:
    """Tokenizer, chat template and token facts of the base model.

    Args:
        tool_format: how the model writes tool calls; "auto": as its chat template says.

    Raises:
        ModelFolderError: the folder holds something that cannot be served.
    """

    def __init__(self, texts: ModelTexts, *, tool_format: ToolFormatName = "auto") -> None:
        document = json.loads(texts.tokenizer_json)
        if not _is_byte_level(document.get("decoder")):
            raise ModelFolderError(
                "tokenizer.json: only byte-level tokenizers are supported (decoder ByteLevel)."
            )
        self._tokenizer = _load_tokenizer(document)
        # Knows no added token, so whatever it is given stays plain text.
        self._plain_tokenizer = _load_tokenizer(
            {**document, "added_tokens": [], "post_processor": None}
        )
        added: list[dict[str, Any]] = document.get("added_tokens") or []
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        special_ids = [token["id"] for token in added if token["special"]]
        self.token_bytes = TokenBytes({id_: t for t, id_ in vocabulary.items()}, special_ids)
        self.vocab_size = min(int(texts.config["vocab_size"]), max(vocabulary.values()) + 1)
        self.context_length = int(texts.config["max_position_embeddings"])
        self.end_token_ids = _end_token_ids(texts.generation_config, texts.config)
        self._shrink = _NORMALIZER_FACTOR if document.get("normalizer") else 1
        self._template: ChatTemplate | None = None
        if texts.chat_template is not None:
            control = [
                token["content"]
                for token in added
                if token["special"] or token["content"] in texts.chat_template
            ]
            self._template = ChatTemplate(
                texts.chat_template,
                _special_tokens(texts.tokenizer_config),
                control,
                tool_format=tool_format,
                special_ids={token["content"]: token["id"] for token in added if token["special"]},
            )
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def has_template(self) -> bool:
        """Whether the model takes chat messages."""
        return self._template is not None

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        return Hermes() if self._template is None else self._template.tool_format

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        context_length: int,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Render and encode; what is long in a thread.

        Raises:
            ChatTemplateError: the template refused the messages.
            ContextLengthError: cannot fit, told from the number of bytes alone: of what is sent, and
                again of what the template makes of it.
            UnsupportedParameterError: the model has no chat template.
        """
        shown = [json.dumps(tools, ensure_ascii=False)] if tools else []
        self._check_bytes(shown, context_length, "tools")
        texts = [text for message in messages for text in message.texts]
        self._check_bytes([*texts, *shown], context_length, "messages")
        if len(messages) > context_length:
            raise too_long(len(messages), context_length, "messages", at_least=True)
        if sum(map(len, texts)) + sum(map(len, shown)) <= _SHORT and len(messages) <= _FEW:
            return self.encode_chat_now(messages, tools, context_length)
        return await self._in_thread(self.encode_chat_now, messages, tools, context_length)

    async def encode_prompt(self, prompt: str, context_length: int) -> list[int]:
        """Encode a raw prompt, a long one in a thread; raises `ContextLengthError` as `encode_chat`."""
        self._check_bytes([prompt], context_length, "prompt")
        if len(prompt) <= _SHORT:
            return self.encode_prompt_now(prompt)
        return await self._in_thread(self.encode_prompt_now, prompt)

    async def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text by itself, as the characters it is, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode_plain_now, texts)

    def encode_chat_now(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] = (),
        context_length: int | None = None,
    ) -> list[int]:
        """Render and encode, here and now; raises as `encode_chat` does (None: of any length)."""
        if self._template is None:
            raise UnsupportedParameterError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        text = self._template.render(messages, tools)
        if context_length is not None:
            self._check_bytes([text], context_length, "messages")
        ids: list[int] = []
        for piece, is_plain in self._template.split(text):
            tokenizer = self._plain_tokenizer if is_plain else self._tokenizer
            ids += _encode(tokenizer, piece, add_special_tokens=False)
        return ids

    def encode_prompt_now(self, prompt: str) -> list[int]:
        """Encode a raw prompt, here and now, with the tokens that the model puts around it."""
        return _encode(self._tokenizer, prompt, add_special_tokens=True)

    def _encode_plain_now(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._plain_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def _check_bytes(self, texts: Sequence[str], context_length: int, param: str) -> None:
        size = sum(len(text.encode()) for text in texts)
        at_least = size // (self.token_bytes.max_length * self._shrink)
        if at_least > context_length:
            raise too_long(at_least, context_length, param, at_least=True)

    async def _in_thread(self, function: Any, *arguments: Any) -> list[int]:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        return cast("list[int]", await loop.run_in_executor(self._threads, function, *arguments))


def too_long(
    num_tokens: int, context_length: int, param: str, *, at_least: bool = False
) -> ContextLengthError:
    """The error for a prompt that leaves no room for even one token."""
    return ContextLengthError(
        f"This model's maximum context length is {context_length} tokens, but the prompt has"
        f" {'at least ' if at_least else ''}{num_tokens} tokens. Shorten the {param}.",
        param=param,
    )


def _encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    if len(text) <= _SHORT:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    # The batch call releases the interpreter lock while it works; the single one does not.
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _load_tokenizer(document: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _end_token_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = tokenizer_config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _inline_template(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # several named ones
        for entry in value:
            if entry.get("name") == "default":
                return str(entry["template"])
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFolderError(f"{path}: {error.strerror}.") from error


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        document = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelFolderError(f"{path}: not JSON ({error}).") from error
    if not isinstance(document, dict):
        raise ModelFolderError(f"{path}: not a JSON object.")
    return document
