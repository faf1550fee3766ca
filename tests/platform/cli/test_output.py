"""What commands print: a table at a terminal, plain lines for a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

ROWS = """
from loraplex_platform.cli.output import print_rows
print_rows([("ID", "NAME"), ("ten_1", "[red]acme[/red]"), ("ten_2", None), ("ten_3", NAME)])
"""
# A name that would clear the screen, turn what follows around, and break the line.
HOSTILE = 'NAME = "a\\x1b[2Jb\\u202ec\\nd" + "x" * 60\n'


def at_a_terminal(code: str) -> str:
    """What a process writes to a terminal of 40 columns."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=theirs,
        stdin=theirs,
        env=os.environ | {"COLUMNS": "40", "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(theirs)
    parts = []
    try:
        while part := os.read(ours, 4096):
            parts.append(part)
    except OSError:
        pass  # how a terminal says that nobody has it open any more
    os.close(ours)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_at_a_terminal_it_is_a_table_that_loses_nothing() -> None:
    shown = at_a_terminal(HOSTILE + ROWS)

    lines = [line.rstrip() for line in shown.splitlines()]
    assert "\x1b[1m" in lines[0]
    assert "[red]acme[/red]" in lines[1]
    assert lines[2].split() == ["ten_2", "-"]
    # Folded, not cut off.
    assert sum(line.count("x") for line in lines) == 60
    assert max(map(len, lines[1:])) <= 40
    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown


def test_for_a_pipe_it_is_a_line_each() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE + ROWS], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [
        "ID     NAME",
        "ten_1  [red]acme[/red]",
        "ten_2  -",
        "ten_3  a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c d" + "x" * 60,
    ]
