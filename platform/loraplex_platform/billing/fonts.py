"""Fonts for paper: Noto Sans, and for what it lacks the Noto fonts of other scripts.

They come as wheels (OFL). Most are variable fonts of many megabytes, so of each only what is needed is
cut out, at the weight it is set in, and remembered.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont
from fontTools.varLib import instancer

REGULAR, BOLD = 400, 700
# Package, and the beginnings of the names of its files, in the order in which they are asked. Han
# characters look as in simplified Chinese unless the text has kana or hangul: see `_order`.
_PACKAGES = (
    ("fontpkg_noto_sans", ("NotoSans[",)),
    ("justmytype_intl_rtl", ("NotoSansArabic", "NotoSansHebrew")),
    (
        "justmytype_intl_south_asia",
        ("NotoSansDevanagari", "NotoSansBengali", "NotoSansTamil", "NotoSansTelugu"),
    ),
    ("justmytype_intl_sea", ("NotoSansThai", "NotoSansLao", "NotoSansKhmer", "NotoSansMyanmar")),
    ("justmytype_intl_cjk", ("NotoSansSC", "NotoSansJP", "NotoSansKR", "NotoSansTC")),
)
_MISSING = "\ufffd"
# All that joins, reorders and places letters and marks. Kerning is the most of a font's tables, and an
# invoice is legible without.
_FEATURES = sorted(set(subset.Options()._layout_features_default) - {"kern", "dist", "cpsp"})


class FontsMissingError(RuntimeError):
    """The font packages of the `platform` extra are not installed."""


@dataclass(frozen=True, slots=True)
class Face:
    """A font file and the characters that it has."""

    name: str
    path: Path
    characters: frozenset[int]


@cache
def faces() -> tuple[Face, ...]:
    """All installed faces, Noto Sans first.

    Raises:
        FontsMissingError: there is no Noto Sans.
    """
    found = []
    for package, prefixes in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in () if spec is None else spec.submodule_search_locations or ():
            files = sorted(Path(root).rglob("*.ttf"))
            for prefix in prefixes:
                path = next((path for path in files if path.name.startswith(prefix)), None)
                if path is not None:
                    with TTFont(path, lazy=True) as font:
                        characters = frozenset(font.getBestCmap())
                    found.append(Face(prefix.rstrip("["), path, characters))
    if not found or found[0].name != "NotoSans":
        raise FontsMissingError(
            "install loraplex[platform]: the package fontpkg-noto-sans is missing"
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Typeface:
    """What a document is set in: `main` for all it can, `fallbacks` for the rest, in this order."""

    main: Face
    fallbacks: tuple[Face, ...]
    characters: frozenset[int]

    def show(self, text: str) -> str:
        """The text, with a mark in place of each character that no font has."""
        return "".join(c if ord(c) in self.characters else _MISSING for c in text)


def choose(texts: Iterable[str]) -> Typeface:
    """The faces that a document needs."""
    main, *others = faces()
    needed = {ord(c) for text in texts for c in text}
    missing = needed - main.characters
    fallbacks = []
    for face in _order(others, needed):
        if missing & face.characters:
            fallbacks.append(face)
            missing -= face.characters
    characters = main.characters.union(*(face.characters for face in fallbacks))
    return Typeface(main, tuple(fallbacks), characters)


def _order(others: list[Face], needed: set[int]) -> list[Face]:
    first = None
    if any(0x3040 <= code <= 0x30FF for code in needed):
        first = "NotoSansJP"
    elif any(0xAC00 <= code <= 0xD7AF for code in needed):
        first = "NotoSansKR"
    return sorted(others, key=lambda face: face.name != first)


def cut_main(face: Face, weight: int, text: Iterable[str]) -> bytes:
    """Noto Sans in one weight with what most documents need, which is cut once for all of them; of other
    alphabets the blocks that the text has something of."""
    blocks = {ord(c) // 128 for c in text} | {0, 1, 2, 0x2000 // 128, ord(_MISSING) // 128}
    return _cut(face, weight, frozenset(c for c in face.characters if c // 128 in blocks))


def cut(face: Face, weight: int, text: Iterable[str]) -> bytes:
    """A font file with these characters only, and all forms that shaping may need of them."""
    return _cut(face, weight, frozenset(ord(c) for c in text) & face.characters)


@lru_cache(maxsize=32)
def _cut(face: Face, weight: int, characters: frozenset[int]) -> bytes:
    options = subset.Options(
        layout_features=_FEATURES, hinting=False, notdef_outline=True, recalc_timestamp=False
    )
    with TTFont(face.path, lazy=True, recalcTimestamp=False) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(unicodes=sorted(characters | {0x20}))
        subsetter.subset(font)
        if "fvar" in font:
            limits = {"wght": weight, "wdth": 100}
            axes = [axis.axisTag for axis in font["fvar"].axes]
            instancer.instantiateVariableFont(
                font, {axis: limits.get(axis) for axis in axes}, inplace=True
            )
        content = BytesIO()
        font.save(content)
    return content.getvalue()
