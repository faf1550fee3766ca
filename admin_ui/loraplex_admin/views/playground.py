"""Ask the base and two revisions the same thing, and watch the answers stream side by side.

Each answer is a request of the tenant's like any other, at the gateway: what it costs is said before and after.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from decimal import Decimal

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, ApiUnreachableError, ChatStream, Tenant
from loraplex_admin.components import address
from loraplex_admin.resources import Collection, Row

_POLL_S = 0.05
# How often a silent stream's clock is redrawn. Streamlit ends a script whose reader has left only
# when it draws, so this bounds how long streams outlive their reader.
_REDRAW_S = 0.5


def render(api: Api, access: Access) -> None:
    """Who is asked, a prompt, a column for each of them, all streams at once."""
    st.title("Playground")
    tenant = choices.tenant(api, access, key="playground_tenant", action="playground.use")
    if tenant is None:
        return
    deployments = api.of_tenant(tenant["id"], "deployments")
    newest = deployments.page(limit=1)["data"]
    if not newest:
        st.info(
            "This tenant has no deployment yet. Deploy an adapter under *Deployments* first, then ask it here.",
            icon=":material/lightbulb:",
        )
        return
    base = newest[0]["base_model"]
    first, second = st.columns(2)
    with first:
        asked = [_Asked(base, "base"), _choose(api, tenant, deployments, "playground_model")]
    with second:
        asked.append(_choose(api, tenant, deployments, "playground_other", is_optional=True))
    shown = [one for one in asked if one is not None]
    with st.form("ask"):
        prompt = st.text_area(
            "Message", "What is the capital of France?", key="playground_prompt", height=80
        )
        left, right = st.columns(2)
        max_tokens = left.slider("Most tokens", 8, 512, 64, key="playground_max_tokens")
        temperature = right.slider("Temperature", 0.0, 2.0, 0.0, key="playground_temperature")
        is_asked = st.form_submit_button("Ask", type="primary", key="playground_ask")
    st.caption(
        f"{len(shown)} answers are {len(shown)} requests of {fmt.code(tenant['slug'])}: within its limits, at its "
        "prices, on its next invoice. What each has cost stands below it."
    )
    held = f"playground_answers_{tenant['id']}"
    if is_asked and not prompt.strip():
        st.warning("Write a message first.")
        return
    if not is_asked:
        _show_again(st.session_state.get(held, []))
        return
    st.session_state.pop(held, None)
    panels = [
        _panel(column, api, tenant, one, prompt, max_tokens, temperature)
        for column, one in zip(st.columns(len(shown)), shown, strict=True)
    ]
    try:
        _follow(panels)
    finally:
        # Also when the reader leaves, which ends this script with an exception.
        for panel in panels:
            panel.stream.close()
        st.session_state[held] = [panel.answer for panel in panels]


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whom a column asks. `revision_id` None: what the model id's clients get now."""

    model: str
    label: str
    revision_id: str | None = None


def _choose(
    api: Api,
    tenant: Tenant,
    deployments: Collection,
    key: str,
    *,
    is_optional: bool = False,
) -> _Asked | None:
    """A deployment and one of its revisions; both are in the address."""
    in_address = "beside" if is_optional else "model"
    rows = [
        *choices.from_many("deployments", deployments.page, key=key),
        *_named_in_address(deployments, in_address),
    ]
    numbers = {one["name"]: one["revision"]["number"] for one in rows}
    names = {name: name for name in numbers}
    if not numbers and not is_optional:
        return None  # none was found, which is said already
    name = choices.kept(
        "Beside it" if is_optional else "Deployment",
        {"": "nothing", **names} if is_optional else names,
        name=in_address,
        is_first_implied=is_optional,
        key=key,
    )
    if not name:
        return None
    revision_name = "beside_revision" if is_optional else "revision"
    before = address.get(revision_name)
    if before is not None and before.rpartition("@")[0] not in ("", name):
        address.put(**{revision_name: None})  # of the deployment that was chosen before
    all_revisions = deployments.under(name, "revisions")
    rows = [
        *choices.from_many(
            "revisions", all_revisions.page, key=f"{key}_revisions_{name}", by="number"
        ),
        *_revision_in_address(all_revisions, revision_name),
    ]
    revisions = {f"{name}@{one['number']}": one for one in rows}
    chosen = choices.kept(
        "Its revision",
        {
            "": f"what answers now (revision {numbers[name]})",
            **{at: _say_revision(one, tenant["billing_tz"]) for at, one in revisions.items()},
        },
        name=revision_name,
        key=f"{key}_revision_{name}",
        help="An older one answers you alone: its clients notice nothing.",
    )
    if not chosen:
        return _Asked(name, f"deployment, revision {numbers[name]}")
    named = revisions[chosen]
    return _Asked(name, f"deployment, revision {named['number']}", named["id"])


def _named_in_address(deployments: Collection, name: str) -> list[Row]:
    """However many there are, the one in the address is among the choices; if it is there."""
    named = address.get(name)
    if named is None:
        return []
    try:
        return [deployments.get(named)]
    except ApiError as error:
        if error.status != 404:
            raise
        return []


def _revision_in_address(revisions: Collection, name: str) -> list[Row]:
    """As `_named_in_address`, by its number: `capitals@3`."""
    number = (address.get(name) or "").rpartition("@")[2]
    if not number.isdecimal():
        return []
    page = revisions.page(search=number, limit=choices.MAX_CHOICES)
    return [one for one in page["data"] if str(one["number"]) == number]


def _say_revision(revision: Row, zone: str) -> str:
    what = (
        "base"
        if revision["adapter_name"] is None
        else f"{revision['adapter_name']} v{revision['version']}"
    )
    day, _, _rest = fmt.time(revision["created_at"], zone).partition(" ")
    return f"revision {revision['number']} · {what} · {day}"


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
    cost: str | None = None  # in words, once it is on the books
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
    asked: _Asked,
    prompt: str,
    max_tokens: int,
    temperature: float,
) -> _Panel:
    stream = api.chat(
        tenant["id"],
        asked.model,
        [{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=temperature,
        revision_id=asked.revision_id,
    )
    pieces: queue.Queue[str | Exception | None] = queue.Queue()
    answer = _Answer(asked.label, asked.model)

    def read() -> None:
        try:
            for piece in stream:
                pieces.put(piece)
            answer.cost = _cost(api, stream)
            pieces.put(None)
        except (ApiError, ApiUnreachableError) as error:
            pieces.put(error)

    with column.container(border=True):
        _head(answer)
        panel = _Panel(answer, st.empty(), st.empty(), stream, pieces)
    # A thread each: two answers must not wait for each other.
    threading.Thread(target=read, name="playground stream", daemon=True).start()
    return panel


def _cost(api: Api, stream: ChatStream) -> str | None:
    """What the books say: the request was settled before its answer ended."""
    if stream.request_id is None or stream.usage is None:
        return None
    tokens = f"{stream.usage['prompt_tokens']:,} + {stream.usage['completion_tokens']:,} tokens"
    try:
        found = api.explain(stream.request_id)["answered_by"]
    except (ApiError, ApiUnreachableError):
        found = None
    if found is None:
        return f"{tokens}; what it cost is on the *Requests* page"
    paid = sum(
        (Decimal(line["amount_usd"]) for line in found["ledger"] if line["account"] == "revenue"),
        Decimal(0),
    )
    return f"{tokens}, {fmt.usd(str(paid))}"


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
    cost = "" if answer.cost is None else f" · {answer.cost.replace('$', chr(92) + '$')}"
    status_place.caption(f"{answer.elapsed_s:.1f} s{state}{cost}")


def _show_again(answers: list[_Answer]) -> None:
    if not answers:
        return
    for column, answer in zip(st.columns(len(answers)), answers, strict=True):
        with column.container(border=True):
            _head(answer)
            _draw(answer, st.empty(), st.empty())
            if not answer.is_done:
                st.caption("Not finished: the page was left.")
