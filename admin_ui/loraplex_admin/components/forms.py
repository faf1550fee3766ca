"""Forms: each is sent once, and one that has gone stale shows what differs instead of winning.

*Once*: what is made carries an Idempotency-Key of this very form and contents, so a second click, a reload or a lost
answer makes nothing twice. *Stale*: a change carries the version that was read when the form was opened; where somebody
was quicker the API refuses (409), and the reader sees field by field what it was, is, and would be.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import ApiError
from loraplex_admin.components import confirm
from loraplex_admin.resources import Row

_BLANK = "–"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a form.

    Attributes:
        name: as the API calls it.
        kind: `text` and `area`: text, None where it is empty and `is_optional`; `secret`: text that is not shown;
            `lines`: a list, one a line; `choice`, `choices`: of `options`; `whole`: an integer; `flag`: yes or no.
        options: values of a choice; `labels` how they are shown.
    """

    name: str
    label: str
    kind: Literal["text", "secret", "area", "lines", "choice", "choices", "whole", "flag"] = "text"
    options: Sequence[Any] = ()
    labels: dict[Any, str] = field(default_factory=dict)
    default: Any = None
    help: str | None = None
    placeholder: str | None = None
    max_chars: int | None = None
    is_optional: bool = False

    def draw(self, key: str, value: Any) -> Any:  # noqa: ANN401 (whatever JSON has there)
        """The widget; what it holds, as the API takes it."""
        if self.kind == "choice":
            options = self._offered(() if value is None else (value,))
            return st.selectbox(
                self.label,
                options,
                index=options.index(value) if value in options else 0,
                format_func=self._label,
                help=self.help,
                key=key,
            )
        if self.kind == "choices":
            return st.multiselect(
                self.label,
                self._offered(value or ()),
                default=list(value or ()),
                format_func=self._label,
                help=self.help,
                key=key,
            )
        if self.kind == "flag":
            return st.toggle(self.label, value=bool(value), help=self.help, key=key)
        if self.kind == "whole":
            return st.number_input(
                self.label,
                value=None if value is None else int(value),
                step=1,
                help=self.help,
                placeholder=self.placeholder,
                key=key,
            )
        return self._draw_text(key, value)

    def _offered(self, held: Sequence[Any]) -> list[Any]:
        """The options, and what is held beside them: it must not change because it was not among the newest."""
        return [*self.options, *(one for one in held if one not in self.options)]

    def _draw_text(self, key: str, value: Any) -> Any:  # noqa: ANN401 (as above)
        shown = "\n".join(value or ()) if self.kind == "lines" else str(value or "")
        if self.kind in ("text", "secret"):
            typed = st.text_input(
                self.label,
                value=shown,
                type="password" if self.kind == "secret" else "default",
                help=self.help,
                placeholder=self.placeholder,
                max_chars=self.max_chars,
                key=key,
            )
        else:
            typed = st.text_area(
                self.label,
                value=shown,
                help=self.help,
                placeholder=self.placeholder,
                max_chars=self.max_chars,
                height=100,
                key=key,
            )
        if self.kind == "lines":
            return [line.strip() for line in typed.splitlines() if line.strip()]
        if self.kind == "secret":
            return typed
        return typed.strip() or (None if self.is_optional else "")

    def _label(self, value: Any) -> str:  # noqa: ANN401 (as above)
        return fmt.cell(self.labels.get(value, str(value)))

    def say(self, value: Any) -> str:  # noqa: ANN401 (as above)
        """A value in words, for the difference."""
        if value is None or value in ("", []):
            return _BLANK
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ", ".join(map(self._label, value))
        return self._label(value)


def once(name: str, body: Row) -> str:
    """The Idempotency-Key of these contents in this form, until `done(name)`."""
    form: str = st.session_state.setdefault(f"{name}_form", uuid.uuid4().hex)
    contents = json.dumps(body, sort_keys=True, default=str).encode()
    return f"console-{form}-{hashlib.sha256(contents).hexdigest()[:16]}"


def done(name: str, fields: Sequence[Field] = ()) -> None:
    """What the form was for is done: the next one is another one, empty, and folded away.

    The fold is an expander with the key `choices.fresh(f"{name}_box")`: what was made is what is looked at next.
    """
    st.session_state.pop(f"{name}_form", None)
    choices.empty(f"{name}_box", *(f"{name}_{one.name}" for one in fields))


def create(
    name: str,
    fields: Sequence[Field],
    *,
    submit: str,
    send: Callable[[Row, str], Row],
    check: Callable[[Row], str | None] | None = None,
    confirm_name: str | None = None,
) -> Row | None:
    """A form for something new; the answer once it is made. Refusals are shown in the API's words.

    Args:
        name: begins the keys of its widgets: `{name}_{field}`, and `{name}_go`.
        send: given the body and the key under which it is made once.
        check: what is missing, in words, before anything is sent.
        confirm_name: what has to be typed first, where something ends with it.
    """
    typed_key = f"{name}_typed"
    with st.form(name, border=False):
        values = {
            one.name: one.draw(choices.fresh(f"{name}_{one.name}"), one.default) for one in fields
        }
        is_named = confirm_name is None or confirm.ask(confirm_name, key=choices.fresh(typed_key))
        is_sent = st.form_submit_button(submit, type="primary", key=f"{name}_go")
    if not is_sent:
        return None
    if not is_named:
        st.error(confirm.NOT_THE_NAME, icon=":material/error:")
        return None
    body = {
        one.name: values[one.name]
        for one in fields
        if not (one.is_optional and values[one.name] in (None, "", []))
    }
    trouble = _unchosen(fields, values)
    if trouble is None and check is not None:
        trouble = check(body)
    if trouble is not None:
        st.error(trouble, icon=":material/error:")
        return None
    try:
        answer = send(body, once(name, body))
    except ApiError as error:
        choices.show_refusal(error)
        return None
    done(name, fields)
    if confirm_name is not None:
        choices.empty(typed_key)
    return answer


def _unchosen(fields: Sequence[Field], values: Row) -> str | None:
    """Which choice had nothing to choose from, for there is none or none was found; in words."""
    empty = [
        one.label
        for one in fields
        if one.kind == "choice" and not one.options and values[one.name] is None
    ]
    return f"Nothing is chosen as {empty[0]}: there is nothing to choose from." if empty else None


def edit(
    name: str,
    current: Row,
    fields: Sequence[Field],
    *,
    save: Callable[[Row, int | None], Row],
    reload: Callable[[], Row],
    submit: str = "Save",
) -> Row | None:
    """A form for what is there, behind a button; the answer once it is changed.

    Args:
        current: as it was read for this run, with its `version`.
        save: given the fields that differ from what was read when the form was opened, and that version.
        reload: reads it again, for the difference.
    """
    slot = f"{name}_opened"
    opened: Row | None = st.session_state.get(slot)
    if opened is None:
        if st.button("Edit", key=f"{name}_edit", icon=":material/edit:"):
            st.session_state[slot] = current
            st.rerun()
        return None
    with st.form(name):
        values = {
            one.name: one.draw(choices.fresh(f"{name}_{one.name}"), opened.get(one.name))
            for one in fields
        }
        with st.container(horizontal=True):
            is_sent = st.form_submit_button(submit, type="primary", key=f"{name}_go")
            is_left = st.form_submit_button("Cancel", key=f"{name}_cancel")
    if is_left:
        _close(name, fields)
        st.rerun()
    mine: Row | None = st.session_state.get(f"{name}_mine")
    if is_sent:
        mine = _changes(values, opened, fields)
        if not mine:
            st.info("Nothing is different yet.")
            return None
        st.session_state.pop(f"{name}_mine", None)
        return _save(name, fields, mine, opened, save)
    if mine is not None:
        return _settle(name, fields, mine, opened, save, reload)
    return None


def _changes(values: Row, opened: Row, fields: Sequence[Field]) -> Row:
    return {
        one.name: values[one.name]
        for one in fields
        if values[one.name] != opened.get(one.name)
        and not (values[one.name] in ("", []) and opened.get(one.name) in (None, "", []))
    }


def _save(
    name: str,
    fields: Sequence[Field],
    mine: Row,
    opened: Row,
    save: Callable[[Row, int | None], Row],
) -> Row | None:
    try:
        answer = save(mine, opened["version"])
    except ApiError as error:
        if not error.is_stale:
            choices.show_refusal(error)
            return None
        st.session_state[f"{name}_mine"] = mine
        st.rerun()
    _close(name, fields)
    return answer


def _settle(
    name: str,
    fields: Sequence[Field],
    mine: Row,
    opened: Row,
    save: Callable[[Row, int | None], Row],
    reload: Callable[[], Row],
) -> Row | None:
    """Show what somebody else has changed meanwhile, and let the reader decide."""
    now = reload()
    st.warning(
        "Somebody changed this while the form was open. Nothing of yours is saved yet.",
        icon=":material/difference:",
    )
    st.dataframe(
        [
            {
                "field": one.label,
                "when you opened it": fmt.cell(one.say(opened.get(one.name))),
                "now": fmt.cell(one.say(now.get(one.name))),
                "yours": fmt.cell(one.say(mine[one.name])) if one.name in mine else "unchanged",
            }
            for one in fields
            if one.name in mine or now.get(one.name) != opened.get(one.name)
        ],
        hide_index=True,
        key=f"{name}_difference",
    )
    with st.container(horizontal=True):
        is_theirs = st.button("Keep what is there now", key=f"{name}_theirs")
        is_mine = st.button("Save mine over it", key=f"{name}_over")
    if is_theirs:
        _close(name, fields)
        st.rerun()
    if is_mine:
        st.session_state.pop(f"{name}_mine", None)
        return _save(name, fields, mine, now, save)
    return None


def _close(name: str, fields: Sequence[Field]) -> None:
    for slot in ("opened", "mine"):
        st.session_state.pop(f"{name}_{slot}", None)
    choices.empty(*(f"{name}_{one.name}" for one in fields))
