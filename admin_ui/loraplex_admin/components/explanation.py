"""What became of a request: which limits decided, what exactly answered it and why that, in the API's words."""

from __future__ import annotations

import json
from typing import Final

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Api, ApiError
from loraplex_admin.resources import Row

_OUTCOMES: Final = {
    "refused": "Refused",
    "running": "Still running",
    "completed": "Answered",
    "aborted": "The caller went away",
    "failed": "Failed",
    "not_run": "Never ran",
    "archived": "Answered, long ago",
}
_BAD: Final = ("refused", "failed")


def show(api: Api, request_id: str, zone: str) -> Row | None:
    """Draw it; the explanation, or None where nothing is known (said on the page). `zone`: of its times."""
    try:
        found = api.explain(request_id)
    except ApiError as error:
        choices.show_refusal(error)
        return None
    say = st.error if found["outcome"] in _BAD else st.info
    outcome = _OUTCOMES.get(found["outcome"], found["outcome"].replace("_", " "))
    say(f"**{outcome}.** {fmt.literal(found['summary'])}")
    for detail in found["details"]:
        st.markdown(f"- {fmt.literal(detail)}")
    answered_by = found.get("answered_by")
    if answered_by is not None:
        st.markdown("**What answered, and why that**")
        for word in answered_by["words"]:
            st.markdown(f"- {fmt.literal(word)}")
        with st.expander("All of it, in numbers", icon=":material/data_object:"):
            st.code(
                json.dumps(answered_by, indent=2, ensure_ascii=False),
                language=None,
                wrap_lines=True,
            )
    st.caption(f"{fmt.code(found['request_id'])} · {fmt.time(found['at'], zone)}")
    return found
