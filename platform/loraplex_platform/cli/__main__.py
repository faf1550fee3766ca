"""`python -m loraplex_platform.cli`: what `loraplex` is, where the script is not on the PATH."""

from loraplex_platform.cli import app

app()
