"""The base model's chat template, in a sandbox: messages in, the prompt's text out.

Equal to transformers' `apply_chat_template` (tested), except for one thing, on purpose: text of the
caller never becomes a control token. A user who writes `<|im_end|>` gets those ten characters in
the prompt, not the end of their turn. To that end control tokens in the caller's text are set
between marks before rendering, private-use characters that say which token it is, and `tokenization.py`
encodes what lies between them as plain text. (transformers does the same with `sanitize_control_tokens=True`.)

Only the base model's own template is ever compiled; a client cannot send one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplex_platform.gateway.chat_message import ChatMessage
from loraplex_platform.gateway.errors import ChatTemplateError
from loraplex_platform.gateway.tool_formats.choice import choose_format
from loraplex_platform.gateway.tool_prompt import fold
from loraplex_platform.settings import ToolFormatName

# Characters that no text means anything with; the caller's own are dropped.
MARK_START = "\ue0f0"
MARK_END = "\ue0f1"
_LAST_CODE = 0x10FFFD  # of the control token: one character each, from here down
_MAX_CONTROL_TOKENS = 4096

_MAX_REASON_CHARS = 200

# What a template may end in because of the messages that it is given.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,  # noqa: ANN401 - whatever the template holds
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML; prompts are not HTML.
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


# The marks stay as they are: escaped, they would no longer mark.
_CODES = f"{chr(_LAST_CODE - _MAX_CONTROL_TOKENS + 1)}-{chr(_LAST_CODE)}"
_NOT_ASCII = re.compile(f"[^\x00-\x7f{MARK_START}{MARK_END}{_CODES}]")


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates print the local date


class ChatTemplate:
    """A compiled chat template. Rendering is pure and may run in any thread.

    Args:
        source: Jinja, from the base model's folder.
        special_tokens: `bos_token`, `eos_token` and so on, as the template names them.
        control_tokens: token texts that only the template may write.
        tool_format: how the model writes tool calls; "auto": as the template does.
        special_ids: ids of tokens that have no text, by what they are called.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        control_tokens: Sequence[str],
        *,
        tool_format: ToolFormatName = "auto",
        special_ids: Mapping[str, int] | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            autoescape=False,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.tool_format, self._knows_tools = choose_format(
            source, takes_tools="tools" in names, wanted=tool_format, special_ids=special_ids
        )
        self._special_tokens = special_tokens
        longest_first = sorted(control_tokens, key=len, reverse=True)
        longest_first = longest_first[:_MAX_CONTROL_TOKENS]
        self._codes = {text: chr(_LAST_CODE - k) for k, text in enumerate(longest_first)}
        control = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control = re.compile(control)
        codes = f"[{chr(_LAST_CODE - len(longest_first))}-{chr(_LAST_CODE)}]"
        self._marks = re.compile(f"{MARK_START}|{MARK_END}|{codes}")
        self._marked_control = re.compile(
            f"{MARK_START}?({codes})({control})(?:({codes}){MARK_END}?)?"
            f"|({control})({codes}){MARK_END}?|{self._marks.pattern}"
        )

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]] = ()) -> str:
        """The prompt that asks for the next assistant turn; marked as the header says.

        Tools, calls and results go to a template that knows the format of calls; for any other they
        become plain messages (`tool_prompt.py`).

        Raises:
            ChatTemplateError: the template refuses these messages (roles must alternate, ...).
        """
        if self._knows_tools:
            messages = self.tool_format.arrange(messages)
        else:
            messages, tools = fold(messages, tools, self.tool_format), ()
        plain = [self._plain(message) for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=self._marked(list(tools)) if tools else None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _REFUSALS as error:
            reason = self._marks.sub("", str(error))
            raise ChatTemplateError(reason[:_MAX_REASON_CHARS]) from error

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Cut rendered text at the marks: (piece, is the caller's control-token text).

        A template may cut the caller's text, at a control token above all, and so lose a mark. Therefore
        a mark says something only about its own control token, right beside it, and either of the two
        will do; any other is dropped.
        """
        pieces: list[tuple[str, bool]] = []
        end = 0
        for match in self._marked_control.finditer(text):
            control = match[2] or match[4]
            codes = (match[1], match[3], match[5])
            pieces.append((text[end : match.start()], False))
            pieces.append((control or "", bool(control) and self._codes[control] in codes))
            end = match.end()
        pieces.append((text[end:], False))
        return _joined(pieces)

    def _plain(self, message: ChatMessage) -> dict[str, Any]:
        """As templates take a turn; what it does not have is absent, not empty."""
        plain: dict[str, Any] = {"role": message.role, "content": self._mark(message.content)}
        if message.calls:
            plain["tool_calls"] = [self._marked(call.plain()) for call in message.calls]
        if message.call_id is not None:
            plain["tool_call_id"] = self._mark(message.call_id)
        if message.name is not None:
            plain["name"] = self._mark(message.name)
        return plain

    def _marked(self, value: Any) -> Any:  # noqa: ANN401 - JSON
        """`value` with every text in it marked."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, list):
            return [self._marked(one) for one in value]
        if isinstance(value, dict):
            return {self._mark(key): self._marked(one) for key, one in value.items()}
        return value

    def _mark(self, text: str) -> str:
        return self._control.sub(self._between_marks, self._marks.sub("", text))

    def _between_marks(self, match: re.Match[str]) -> str:
        code = self._codes[match[0]]
        return f"{MARK_START}{code}{match[0]}{code}{MARK_END}"


def _joined(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Without empty pieces; the template's own text stays whole where only a mark was dropped."""
    joined: list[tuple[str, bool]] = []
    for piece, is_plain in pieces:
        if piece and joined and not (is_plain or joined[-1][1]):
            joined[-1] = (joined[-1][0] + piece, False)
        elif piece:
            joined.append((piece, is_plain))
    return joined
