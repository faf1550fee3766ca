"""Ask a deployment and the base the same thing, and watch both answers stream side by side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from loraplex_admin import choices
from loraplex_admin.api import Api, ApiError, ApiUnreachableError, Tenant, User

_POLL_S = 0.05


def render(api: Api, user: User) -> None:
    """A prompt, two columns, two streams at once."""
    st.title("Playground")
    tenant = choices.tenant(api, key="playground_tenant")
    if tenant is None:
        return
    if user["role"] != "admin":
        st.info("Viewers cannot ask: answers are billed to the tenant.")
        return
    deployments = api.deployments(tenant["id"])["data"]
    if not deployments:
        st.info("This tenant has no deployment yet. Deploy an adapter under *Adapters*.")
        return
    names = [deployment["name"] for deployment in deployments]
    base = deployments[0]["base_model"]
    with st.form("ask"):
        model = st.selectbox("Deployment", names, key="playground_model")
        prompt = st.text_area(
            "Message", "What is the capital of France?", key="playground_prompt", height=80
        )
        left, right = st.columns(2)
        max_tokens = left.slider("Most tokens", 8, 512, 64, key="playground_max_tokens")
        temperature = right.slider("Temperature", 0.0, 2.0, 0.0, key="playground_temperature")
        is_asked = st.form_submit_button("Ask both", type="primary")
    st.caption(f"Answers are billed to {tenant['slug']} like any other request.")
    if not is_asked:
        return
    if not prompt.strip():
        st.warning("Write a message first.")
        return
    columns = st.columns(2)
    panels = []
    for column, name, label in (
        (columns[0], base, f"{base} (base)"),
        (columns[1], model, str(model)),
    ):
        with column.container(border=True):
            st.caption(label)
            panels.append(
                _Panel(
                    st.empty(),
                    _start(api, tenant, str(name), prompt, max_tokens, temperature),
                )
            )
    _show(panels)


@dataclass(slots=True)
class _Panel:
    place: DeltaGenerator
    pieces: queue.Queue[str | Exception | None]
    text: str = ""
    is_done: bool = False


def _start(
    api: Api, tenant: Tenant, model: str, prompt: str, max_tokens: int, temperature: float
) -> queue.Queue[str | Exception | None]:
    """Stream in a thread of its own: two answers must not wait for each other."""
    pieces: queue.Queue[str | Exception | None] = queue.Queue()

    def run() -> None:
        try:
            stream: Iterator[str] = api.stream_chat(
                tenant["id"],
                model,
                [{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=temperature,
            )
            for piece in stream:
                pieces.put(piece)
            pieces.put(None)
        except (ApiError, ApiUnreachableError) as error:
            pieces.put(error)

    threading.Thread(target=run, daemon=True).start()
    return pieces


def _show(panels: list[_Panel]) -> None:
    while not all(panel.is_done for panel in panels):
        for panel in panels:
            if panel.is_done:
                continue
            try:
                piece = panel.pieces.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(piece, str):
                panel.text += piece
                panel.place.text(panel.text)
            else:
                panel.is_done = True
                if isinstance(piece, Exception):
                    panel.place.error(f"{panel.text}\n\n{piece}" if panel.text else str(piece))
