"""Ask the base and two deployments the same thing, and watch the answers stream side by side."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, ApiUnreachableError, ChatStream, Tenant

_POLL_S = 0.05
# How often a silent stream's clock is redrawn. Streamlit ends a script whose reader has left only
# when it draws, so this bounds how long streams outlive their reader.
_REDRAW_S = 0.5


def render(api: Api, access: Access) -> None:
    """A prompt, a column for each who is asked, all streams at once."""
    st.title("Playground")
    tenant = choices.tenant(api, access, key="playground_tenant", action="playground.use")
    if tenant is None:
        return
    deployments = api.deployments(tenant["id"])["data"]
    if not deployments:
        st.info(
            "This tenant has no deployment yet. Deploy an adapter first, then ask it here.",
            icon=":material/lightbulb:",
        )
        return
    base = deployments[0]["base_model"]
    numbers = {one["name"]: one["revision"]["number"] for one in deployments}
    with st.form("ask"):
        first, second = st.columns(2)
        model = first.selectbox("Deployment", list(numbers), key="playground_model")
        other = second.selectbox(
            "Beside it",
            ["", *numbers],
            format_func=lambda name: name or "nothing",
            help="Two revisions are compared under two model ids.",
            key="playground_other",
        )
        prompt = st.text_area(
            "Message", "What is the capital of France?", key="playground_prompt", height=80
        )
        left, right = st.columns(2)
        max_tokens = left.slider("Most tokens", 8, 512, 64, key="playground_max_tokens")
        temperature = right.slider("Temperature", 0.0, 2.0, 0.0, key="playground_temperature")
        is_asked = st.form_submit_button("Ask", type="primary", key="playground_ask")
    st.caption(f"Answers are billed to {fmt.code(tenant['slug'])} like any other request.")
    held = f"playground_answers_{tenant['id']}"
    if is_asked and not prompt.strip():
        st.warning("Write a message first.")
        return
    if not is_asked:
        _show_again(st.session_state.get(held, []))
        return
    st.session_state.pop(held, None)
    asked = [(base, "base")]
    asked += [(name, f"deployment, revision {numbers[name]}") for name in (model, other) if name]
    panels = [
        _panel(column, api, tenant, name, label, prompt, max_tokens, temperature)
        for column, (name, label) in zip(st.columns(len(asked)), asked, strict=True)
    ]
    try:
        _follow(panels)
    finally:
        # Also when the reader leaves, which ends this script with an exception.
        for panel in panels:
            panel.stream.close()
        st.session_state[held] = [panel.answer for panel in panels]


@dataclass(slots=True)
class _Answer:
    """What one side has said so far."""

    label: str
    model: str
    started_s: float = field(default_factory=time.monotonic)
    text: str = ""
    num_pieces: int = 0
    elapsed_s: float = 0.0
    error: str | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Panel:
    answer: _Answer
    text_place: DeltaGenerator
    status_place: DeltaGenerator
    stream: ChatStream
    pieces: queue.Queue[str | Exception | None]
    drawn_s: float = 0.0


def _panel(
    column: DeltaGenerator,
    api: Api,
    tenant: Tenant,
    model: str,
    label: str,
    prompt: str,
    max_tokens: int,
    temperature: float,
) -> _Panel:
    stream = api.chat(
        tenant["id"],
        model,
        [{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=temperature,
    )
    pieces: queue.Queue[str | Exception | None] = queue.Queue()

    def read() -> None:
        try:
            for piece in stream:
                pieces.put(piece)
            pieces.put(None)
        except (ApiError, ApiUnreachableError) as error:
            pieces.put(error)

    answer = _Answer(label, model)
    with column.container(border=True):
        _head(answer)
        panel = _Panel(answer, st.empty(), st.empty(), stream, pieces)
    # A thread each: two answers must not wait for each other.
    threading.Thread(target=read, name="playground stream", daemon=True).start()
    return panel


def _follow(panels: list[_Panel]) -> None:
    while not all(panel.answer.is_done for panel in panels):
        for panel in panels:
            if not panel.answer.is_done:
                _advance(panel)


def _advance(panel: _Panel) -> None:
    """Take what has come, and draw it once."""
    answer = panel.answer
    try:
        pieces = [panel.pieces.get(timeout=_POLL_S)]
        while not panel.pieces.empty():
            pieces.append(panel.pieces.get_nowait())
    except queue.Empty:
        pieces = []
    now = time.monotonic()
    answer.elapsed_s = now - answer.started_s
    for piece in pieces:
        if isinstance(piece, str):
            answer.text += piece
            answer.num_pieces += 1
            continue
        answer.is_done = True
        if isinstance(piece, ApiError):
            answer.error = str(piece)
        elif piece is not None:
            answer.error = "The control API stopped answering."
    if pieces or now - panel.drawn_s > _REDRAW_S:
        panel.drawn_s = now
        _draw(answer, panel.text_place, panel.status_place)


def _head(answer: _Answer) -> None:
    st.caption(f"{answer.label} · {fmt.code(answer.model)}")


def _draw(answer: _Answer, text_place: DeltaGenerator, status_place: DeltaGenerator) -> None:
    """Text as it is, never as Markdown: a model may write anything."""
    if answer.text:
        text_place.text(answer.text)
    elif answer.is_done and answer.error is None:
        text_place.caption("It said nothing.")
    if answer.error is not None:
        status_place.error(fmt.literal(answer.error), icon=":material/error:")
        return
    state = "" if answer.is_done else " …"
    status_place.caption(f"{answer.elapsed_s:.1f} s{state}")


def _show_again(answers: list[_Answer]) -> None:
    if not answers:
        return
    for column, answer in zip(st.columns(len(answers)), answers, strict=True):
        with column.container(border=True):
            _head(answer)
            _draw(answer, st.empty(), st.empty())
            if not answer.is_done:
                st.caption("Not finished: the page was left.")
