"""What every source of adapters gives: sizes first, then bytes, and what it stands for exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from loraplex_engine.artifact import CONFIG_FILE, TENSORS_FILE

from loraplex_platform.errors import BodyTooLargeError, UnavailableError
from loraplex_platform.registry.errors import AdapterRejectedError
from loraplex_platform.registry.upload import MAX_CONFIG_BYTES

PIECE_BYTES: Final = 1 << 20

# Told how many bytes came; raises to end the transfer.
OnBytes = Callable[[int], None]


class SourceUnavailableError(UnavailableError):
    """The place cannot be reached now: the import is tried again."""

    code = "source_unavailable"


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is, before a byte of it is read."""

    resolved: str  # the source, pinned to what cannot change where the place knows how
    sizes: dict[str, int]  # of the two files


class Source(Protocol):
    """One adapter at one place. Called from a thread of its own; nothing here waits on an event loop."""

    def look(self, max_model_bytes: int) -> Listing:
        """What is there.

        Raises:
            AdapterRejectedError: it is no adapter.
            BodyTooLargeError: a file is over its cap.
            SourceUnavailableError: it cannot be asked now.
        """
        ...

    def read(self, listing: Listing, into: Path, on_bytes: OnBytes) -> None:
        """Copy the two files, never more than was listed.

        Raises:
            AdapterRejectedError: they are not what was listed.
            SourceUnavailableError: the transfer was cut.
        """
        ...


def check_names(names: set[str], where: str) -> None:
    """Both files are there, and the weights are no pickle.

    Raises:
        AdapterRejectedError: they are not.
    """
    if CONFIG_FILE not in names:
        raise AdapterRejectedError(
            "source", f"{where} has no {CONFIG_FILE}.", "Name the folder that PEFT saved."
        )
    if TENSORS_FILE not in names:
        pickles = sorted(name for name in names if name.startswith("adapter_model."))
        if pickles:
            raise AdapterRejectedError(
                "source",
                f"{where} has {', '.join(pickles)[:200]} but no {TENSORS_FILE}; pickles are never opened.",
                "Save it with safetensors: save_pretrained(folder, safe_serialization=True).",
            )
        raise AdapterRejectedError(
            "source", f"{where} has no {TENSORS_FILE}.", "Name the folder that PEFT saved."
        )


def check_sizes(sizes: dict[str, int], max_model_bytes: int) -> None:
    """Nothing is larger than an upload may be.

    Raises:
        BodyTooLargeError: something is.
    """
    for name, cap in ((CONFIG_FILE, MAX_CONFIG_BYTES), (TENSORS_FILE, max_model_bytes)):
        if sizes[name] > cap:
            raise BodyTooLargeError(
                f"source: {name} has {sizes[name]} bytes; {cap} are allowed. Use a smaller rank or fewer target"
                " modules.",
                param="source",
            )


def changed_meanwhile(name: str) -> AdapterRejectedError:
    """A file is not as long as it was when it was listed."""
    return AdapterRejectedError(
        "source", f"{name} changed while it was read.", "Import it once it is finished."
    )
