"""Names of full blocks: what a block holds, for whom and after what, as one SHA-256.

name = SHA-256 over tagged, length-prefixed fields: base model, KV format, salt, adapter (or none), the
name of the block before (or none), the block's token ids. Two blocks have one name only if they hold the
same keys and values for the same owner. Tags and lengths keep fields apart, so that a salt "X" is never
an adapter "X"; a cryptographic hash, because who can make two blocks collide reads another's cache.

A block that lies wholly inside a prefix that the operator declared public is named with the public salt,
so all tenants share it (per adapter); every other block with its tenant's own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

BlockName = bytes  # 32

_MODEL, _FORMAT, _BLOCK_SIZE = b"M", b"K", b"B"
_TENANT_SALT, _PUBLIC = b"S", b"P"
_ADAPTER, _NO_ADAPTER = b"A", b"N"
_PARENT, _NO_PARENT = b"R", b"F"
_TOKENS = b"T"


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def copy(self) -> Self: ...
    def digest(self) -> bytes: ...


def _field(tag: bytes, value: bytes = b"") -> bytes:
    return tag + len(value).to_bytes(8, "little") + value


@dataclass(slots=True, eq=False)
class BlockChain:
    """Names of one sequence's full blocks, in order; grows, and never hashes a token twice.

    The sequence may be longer than what is named: `extend` takes it from there.
    """

    owner: str  # the tenant
    adapter_digest: str | None
    num_public: int  # leading blocks that are named with the public salt
    _block_size: int
    _private: _Hash  # fed with all fields that the sequence's blocks have in common
    _public: _Hash
    names: list[BlockName] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Name the first `num_blocks` blocks of the sequence, as far as they have none yet."""
        size = self._block_size
        for index in range(len(self.names), num_blocks):
            block = token_ids[index * size : (index + 1) * size]
            assert len(block) == size, "only a full block has a name"
            name = (self._public if index < self.num_public else self._private).copy()
            name.update(_field(_PARENT, self.names[-1]) if self.names else _field(_NO_PARENT))
            name.update(_field(_TOKENS, struct.pack(f"<{size}I", *block)))
            self.names.append(name.digest())

    def fork(self, num_blocks: int) -> BlockChain:
        """A chain of its own for another continuation of the first `num_blocks` blocks."""
        return BlockChain(
            self.owner,
            self.adapter_digest,
            self.num_public,
            self._block_size,
            self._private,
            self._public,
            self.names[:num_blocks],
        )


class BlockHasher:
    """Makes chains for one model and KV format.

    Args:
        model_fingerprint: weights, dtype and everything else that changes keys and values.
        kv_format: how a block lies in memory, and which arithmetics computed it; the parallel degree is not part of it.
        public_prefixes: token ids that all tenants may share (see `kv.public_prefix`).
    """

    def __init__(
        self,
        *,
        model_fingerprint: str,
        kv_format: str,
        block_size: int,
        public_prefixes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.block_size = block_size
        self._public_prefixes = [list(prefix) for prefix in public_prefixes]
        self._root = hashlib.sha256(
            _field(_MODEL, model_fingerprint.encode())
            + _field(_FORMAT, kv_format.encode())
            + _field(_BLOCK_SIZE, str(block_size).encode())
        )

    def chain(
        self,
        prompt_token_ids: Sequence[int],
        *,
        owner: str,
        salt: bytes,
        adapter_digest: str | None,
    ) -> BlockChain:
        """A chain that names nothing yet. Only the prompt can lie in a public prefix, not the answer."""
        adapter = (
            _field(_NO_ADAPTER)
            if adapter_digest is None
            else _field(_ADAPTER, adapter_digest.encode())
        )
        private, public = self._root.copy(), self._root.copy()
        private.update(_field(_TENANT_SALT, salt) + adapter)
        public.update(_field(_PUBLIC) + adapter)
        return BlockChain(
            owner=owner,
            adapter_digest=adapter_digest,
            num_public=self._num_public_blocks(prompt_token_ids),
            _block_size=self.block_size,
            _private=private,
            _public=public,
        )

    def _num_public_blocks(self, prompt: Sequence[int]) -> int:
        size = self.block_size
        most = 0
        for prefix in self._public_prefixes:
            limit = min(len(prefix), len(prompt)) // size
            count = 0
            while count < limit and (
                prefix[count * size : (count + 1) * size]
                == list(prompt[count * size : (count + 1) * size])
            ):
                count += 1
            most = max(most, count)
        return most
