"""What `loraplex up` shows while it starts, runs and stops: spinners on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from loraplex_platform.local.supervisor import Event, State

_MARKS: dict[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "starting": ("…", "cyan"),
    "ready": ("✓", "green"),
    "restarting": ("!", "yellow"),
    "stopping": ("…", "cyan"),
    "stopped": ("✓", "green"),
    "stuck": ("✗", "red"),
}


class LastingOutput(io.TextIOBase):
    """A stream whose reader may go: what is written then is lost, and its writer goes on.

    A closed terminal, or a `| tee` that a Ctrl-C ended first, must not keep a fleet from being stopped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute
        """As of the stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether the stream is, or was, a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write, to nowhere if the reader has gone."""
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        """As `write`."""
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        # The descriptor is given another end: what the stream still holds is flushed at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class Display:
    """Listens to a supervisor. As a context it animates; outside it prints each event as a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._rows: dict[str, TaskID] = {}
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this display was made."""
        return time.monotonic() - self._started

    def __enter__(self) -> Self:
        """Animate from now on, if this is a terminal."""
        if self._console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description}"),
                console=self._console,
                transient=False,
            )
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the last picture on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._rows.clear()

    def step(self, name: str, text: str, *, is_done: bool = False) -> None:
        """A step of the start that is not a service."""
        self._show(name, "ready" if is_done else "starting", text)

    def __call__(self, event: Event) -> None:
        """Show one event of the supervisor."""
        detail = {
            "waiting": "waiting",
            "starting": "starting",
            "ready": f"ready ({event.detail})" if event.detail else "ready",
            "restarting": event.detail,
            "stopping": "stopping",
            "stopped": "stopped" + (f" ({event.detail})" if event.detail else ""),
            "stuck": event.detail,
        }[event.state]
        self._show(event.service, event.state, detail)
        for line in event.last_lines:
            self._console.print(Text(f"    {line}", style="dim"), soft_wrap=True)

    def _show(self, name: str, state: State, detail: str) -> None:
        if self._progress is None:
            # Lines are for events that say something; "waiting" and "stopping" only fill a log.
            if state not in {"waiting", "stopping", "starting"}:
                mark, style = _MARKS[state]
                self._console.print(
                    Text.assemble((mark, style), f" {name:<9} {detail}"), soft_wrap=True
                )
            return
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._progress.add_task("", total=1)
        is_settled = state in {"ready", "stopped"}
        style = "yellow" if state in {"restarting", "stuck"} else ("" if is_settled else "dim")
        text = f"{name:<9} {detail}"
        self._progress.update(
            row,
            completed=1 if is_settled else 0,
            description=f"[{style}]{text}[/]" if style else text,
        )
