"""Token ids to text, one token at a time, for byte-level tokenizers.

Works on bytes, never on re-decoded windows: the text of all tokens pushed so far is always a prefix
of the tokenizer's own decode of them, and a character is shown only once all of its bytes are here.
Pure Python, no `tokenizers` object: `tokenization.py` hands in the table of token bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Final

# Invalid UTF-8 becomes U+FFFD once per maximal subpart, in Python as in Rust's from_utf8_lossy.
_decoder_class: Final = codecs.getincrementaldecoder("utf-8")


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others follow from U+0100.

    Source: the byte alphabet of GPT-2's vocabulary, which `tokenizers` calls ByteLevel.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for.

    A token with a character outside the alphabet (an added token) stands for its own UTF-8.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


class TokenBytes:
    """What every token id contributes to the text: bytes, or nothing for a special token.

    Args:
        tokens: token string by id; an id that is not here contributes nothing.
        special_ids: skipped in text, as `skip_special_tokens=True` does.

    Attributes:
        max_length: bytes of the longest token: no text has fewer tokens than its bytes divided by this.
    """

    def __init__(self, tokens: Mapping[int, str], special_ids: Sequence[int]) -> None:
        self._bytes = {id_: byte_level_bytes(token) for id_, token in tokens.items()}
        self._names = {id_: tokens.get(id_, "") for id_ in special_ids}
        self.max_length = max(map(len, self._bytes.values()), default=1)

    def is_special(self, token_id: int) -> bool:
        """Skipped in text."""
        return token_id in self._names

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; empty for special and unknown ids."""
        if token_id in self._names:
            return b""
        return self._bytes.get(token_id, b"")

    def label(self, token_id: int) -> str:
        """The token as log-probability lists show it; part of a character as `bytes:\\x..`."""
        if token_id in self._names:
            return self._names[token_id]
        raw = self._bytes.get(token_id, b"")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Detokenizer:
    """The text of one growing sequence of output tokens.

    Args:
        shown_ids: special tokens that do have text here: their names.
    """

    def __init__(self, token_bytes: TokenBytes, shown_ids: Collection[int] = ()) -> None:
        self._token_bytes = token_bytes
        self._shown_ids = shown_ids
        self._decoder = _decoder_class(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while a character is unfinished."""
        return self._decode(self._bytes_of(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The same for several tokens, one after the other."""
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._shown_ids:
            return self._token_bytes.label(token_id).encode()
        return self._token_bytes.text_bytes(token_id)

    def _decode(self, data: bytes) -> str:
        if not self._decoder.buffer:
            # Whole characters, as nearly always: the incremental decoder is Python, this is not.
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        return self._decoder.decode(data)

    @property
    def has_pending(self) -> bool:
        """Bytes of an unfinished character are held."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The rest, at the end: an unfinished character shows as U+FFFD, as in the full decode."""
        return self._decoder.decode(b"", final=True)
