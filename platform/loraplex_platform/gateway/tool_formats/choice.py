"""Which format a model writes: what its chat template says, unless a setting says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from loraplex_platform.gateway.tool_formats.hermes import Hermes
from loraplex_platform.gateway.tool_formats.llama import Llama
from loraplex_platform.gateway.tool_formats.mistral import Mistral
from loraplex_platform.gateway.tool_formats.tool_format import ToolFormat
from loraplex_platform.settings import ToolFormatName

# In this order: templates that show an example of their format may hold words of another's.
_FORMATS: Final[tuple[type[ToolFormat], ...]] = (Hermes, Mistral, Llama)


def choose_format(
    template: str,
    *,
    takes_tools: bool,
    wanted: ToolFormatName = "auto",
    special_ids: Mapping[str, int] | None = None,
) -> tuple[ToolFormat, bool]:
    """The format, and whether the template itself tells the model of it.

    A template that takes no tools, or writes none of the formats or another one than is wanted, is not
    given tools: its model is told of the format in plain messages. One that is not known to write any
    format is believed to write the one that is wanted by name.
    """
    seen = None
    if takes_tools:
        seen = next((kind for kind in _FORMATS if kind.is_used_by(template)), None)
    named = next((kind for kind in _FORMATS if kind.name == wanted), None)
    kind = named or seen or Hermes
    is_native = takes_tools and (seen or named) is kind
    return kind(special_ids), is_native
