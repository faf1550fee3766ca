"""The Lua scripts: each runs as one step of Redis, on keys of one hash tag."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

ScriptName = Literal["admit", "release", "renew", "rebuild", "newest", "throttle"]


@dataclass(frozen=True, slots=True)
class Script:
    """Its text, and the name by which Redis knows it once it has seen it."""

    name: str
    text: str
    sha: str


def load_script(name: ScriptName) -> Script:
    """From its file."""
    text = files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


ADMIT = load_script("admit")
RELEASE = load_script("release")
RENEW = load_script("renew")
REBUILD = load_script("rebuild")
NEWEST = load_script("newest")
THROTTLE = load_script("throttle")
