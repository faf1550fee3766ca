"""Figures that draw themselves anew, within a budget: at most one call of the API a second for a page.

A tab that nobody looks at goes on asking; a fleet of such tabs must not be a load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import streamlit as st

from loraplex_admin import choices
from loraplex_admin.api import ApiError, ApiUnreachableError

SECONDS_PER_CALL: Final = 1.0
_EVERY_S: Final = 3.0


def live(draw: Callable[[], None], *, calls: int, every_s: float = _EVERY_S) -> None:
    """Draw a part of the page now and then again, never oftener than its calls allow.

    Args:
        draw: asks and draws; an error stays in its part of the page, and the next round tries again.
        calls: how many calls of the API one round makes.
    """

    @st.fragment(run_every=interval_s(calls, every_s))
    def round_() -> None:
        try:
            draw()
        except ApiUnreachableError:
            st.error("The control API does not answer. Trying again.", icon=":material/cloud_off:")
        except ApiError as error:
            choices.show_refusal(error)

    round_()


def interval_s(calls: int, every_s: float = _EVERY_S) -> float:
    """How often a part with so many calls may run, in seconds."""
    return max(every_s, calls * SECONDS_PER_CALL)
