"""The `loraplex` command. Entry point: `app`.

Only typer and rich are imported here: a command imports what it needs when it runs, so `--help` is quick
and no process loads another's dependencies. Commands that need torch run in a process of their own.
"""

from loraplex_platform.cli.commands import app

__all__ = ["app"]
