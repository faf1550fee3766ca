"""Widgets and lines that several pages share."""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import streamlit as st

from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, ApiUnreachableError, Page, Tenant
from loraplex_admin.components import address, redirect

# Enough for a select box with search; beyond it the reader pastes an id.
MAX_CHOICES = 100
_RETRY_S: Final = 3.0
_OF_A_TENANT: Final = ("id", "after", "model", "revision", "beside", "beside_revision")
_KEPT: Final = "typed_before_the_api_went_away"


def tenant(
    api: Api, access: Access, *, key: str, action: str, allow_all: bool = False
) -> Tenant | None:
    """Let the reader choose a tenant; the choice is in the address, and follows them from page to page.

    Args:
        action: what the page does there: tenants in which it is not allowed are not offered.
        allow_all: "All tenants" may be chosen, for who is allowed it in more than one.

    None: there is no tenant yet, or `allow_all` and all were chosen. Where the address or the reader names a tenant that
    is none of theirs the page ends with an error: never is another one shown in its place.
    """
    page = api.tenants(limit=MAX_CHOICES)
    tenants = {one["id"]: one for one in page["data"] if access.may(action, one["id"])}
    named = address.get("tenant")
    wanted = named or str(st.session_state.get("last_tenant_id", ""))
    if wanted and wanted not in tenants:
        found = _find(api, wanted)
        if found is not None and not access.may(action, found["id"]):
            found = None
        if found is None and named is not None:
            _refuse_address("tenant", named, "There is no such tenant, or you may not see this in")
        wanted = found["id"] if found else ""
        tenants |= {found["id"]: found} if found else {}
    if not tenants and not allow_all:
        st.info(
            "There is no tenant yet. Create one under *Tenants*."
            if access.may("tenant.create")
            else "You are in no tenant where you may see this. Ask an owner to invite you.",
            icon=":material/lightbulb:",
        )
        return None
    ids = ["", *tenants] if allow_all else list(tenants)
    chosen = st.selectbox(
        "Tenant",
        ids,
        index=ids.index(wanted) if wanted in ids else 0,
        format_func=lambda id_: tenants[id_]["slug"] if id_ in tenants else id_ or "All tenants",
        accept_new_options=page["has_more"],
        help=f"The newest {MAX_CHOICES} are listed; write the name or the id of another."
        if page["has_more"]
        else None,
        key=key,
    )
    found = None
    if chosen:
        found = tenants.get(chosen) or _find(api, chosen.strip())
        if found is None:
            st.error(f"No tenant is called {fmt.code(chosen)}.", icon=":material/error:")
            st.stop()
    if named is not None and (found is None or named not in (found["slug"], found["id"])):
        _forget_what_was_open()
    st.session_state["last_tenant_id"] = found["id"] if found else ""
    address.put(tenant=found["slug"] if found else None)
    return found


def _find(api: Api, name: str) -> Tenant | None:
    """By slug, or by id."""
    if name.startswith("ten_"):
        try:
            return api.tenant(name)
        except ApiError as error:
            if error.status != 404:
                raise
    return api.tenant_called(name)


def _refuse_address(name: str, value: str, why: str) -> NoReturn:
    """End the page where its address names what is not there: something else in its place would pass for it."""
    st.error(f"{why}: {fmt.code(value)}. Nothing is shown.", icon=":material/error:")
    if st.button("Choose another", key=f"forget_{name}"):
        address.put(**{name: None})
        if name == "tenant":
            st.session_state.pop("last_tenant_id", None)
            _forget_what_was_open()
        st.rerun()
    st.stop()


def _forget_what_was_open() -> None:
    """What belongs to the tenant that was left is of nobody else."""
    for name in list(st.query_params):
        if name in _OF_A_TENANT or name.endswith(("_id", "_after")):
            del st.query_params[name]


def from_many(
    what: str, fetch: Callable[..., Page[Any]], *, key: str, by: str = "name"
) -> Sequence[Any]:
    """Rows to choose from: the newest or, where there are more, what the server finds for what is typed.

    Outside of forms, in which nothing is asked before they are sent.

    Args:
        what: is searched, in the plural: `adapters`.
        fetch: one page: `fetch(search=...)`.
        by: what of them is searched.
    """
    name = f"{key}_search"
    search = str(st.session_state.get(name, "")).strip() or None
    page = fetch(search=search)
    if search or page["has_more"]:
        st.text_input(
            f"Search {what}",
            max_chars=80,
            key=name,
            icon=":material/search:",
            placeholder=f"A piece of the {by}",
            help=f"There are more {what} than are offered at a time: search first, then fill in the rest.",
        )
    if search and not page["data"]:
        # Nothing is offered, lest something that was not meant be taken.
        st.warning(f"No {what} have that in their {by}. Try a shorter piece, or empty the search.")
    return page["data"]


def kept(
    label: str,
    options: Mapping[str, str],
    *,
    name: str,
    key: str | None = None,
    help: str | None = None,
    is_first_implied: bool = True,
) -> str:
    """A choice that is in the address as `name`; its first option is what an address without it means.

    Args:
        options: what may be chosen, each with its words.
        is_first_implied: the first option is left out of the address; not where a search changes which one is first.
    """
    values = list(options)
    before = address.get(name)
    if before is not None and before not in options:
        _refuse_address(name, before, f"There is no such {label.lower()}")
    chosen = st.selectbox(
        label,
        values,
        index=values.index(before) if before is not None and before in options else 0,
        format_func=lambda value: fmt.cell(options.get(value, value)),
        help=help,
        key=key or name,
    )
    address.put(**{name: None if is_first_implied and chosen == values[0] else chosen})
    return chosen


def filtered(label: str, options: Mapping[str, str], *, name: str) -> str | None:
    """Let the reader narrow the page's own list; None: to nothing. The choice is in the address."""
    before = address.get(name)
    chosen = kept(label, {"": "any", **options}, name=name, key=f"{name}_filter")
    if (chosen or None) != before:
        address.put(after=None, id=None)
    return chosen or None


def fresh(name: str) -> str:
    """The key of a field that `empty(name)` empties: browsers keep what was typed under a key."""
    times = st.session_state.get(f"{name}_times", 0)
    return f"{name}_{times}" if times else name


def empty(*names: str) -> None:
    """Empty fields whose contents have been used, at the next run."""
    for name in names:
        st.session_state.pop(fresh(name), None)
        st.session_state[f"{name}_times"] = st.session_state.get(f"{name}_times", 0) + 1


def empty_when_done(*names: str) -> None:
    """Empty these once `rerun_with_notice` says that it is done: what was refused can be tried again as it stands."""
    st.session_state["empty_when_done"] = names


def rerun_with_notice(text: str) -> None:
    """Run the page again, with what has been done said above it, in Markdown."""
    empty(*st.session_state.pop("empty_when_done", ()))
    st.session_state["notice"] = text
    st.rerun()


def show_notice() -> None:
    """What `rerun_with_notice` left, until the next click."""
    text = st.session_state.pop("notice", None)
    if text is not None:
        st.success(text, icon=":material/check_circle:")


def show_refusal(error: ApiError) -> None:
    """The API's own words; they name the field and the remedy."""
    where = f" ({fmt.code(error.param)})" if error.param else ""
    if error.status == 401:
        st.error("Your session is over. Nothing was changed.", icon=":material/lock_clock:")
        offer_login("Log in again")
        return
    st.error(f"{fmt.literal(str(error))}{where}", icon=":material/error:")


def offer_login(label: str) -> None:
    """By this page's own address, which without a session leads to the form and from there back here."""
    if st.button(label, type="primary", key="log_in"):
        redirect.to(redirect.here())


def _keep_what_was_typed() -> None:
    """Before a run that does not draw the page: Streamlit forgets what those fields hold that it does not see in a run.

    Buttons, uploads and ticked rows are left out: nothing may be set into those, and pressed once is enough.
    """
    kept: dict[str, Any] = st.session_state.setdefault(_KEPT, {})
    for name, value in st.session_state.to_dict().items():
        is_words = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if is_words or type(value) in (str, int, float):
            kept[str(name)] = value


def give_back_what_was_typed() -> None:
    """Into the fields of a page that is drawn again after `wait_for_the_api`; before any of them is."""
    for name, value in st.session_state.pop(_KEPT, {}).items():
        st.session_state[name] = value


def wait_for_the_api(api: Api) -> None:
    """One line instead of a page, and the page by itself as soon as the control API answers again."""
    _keep_what_was_typed()
    began_s = clock.monotonic()
    st.error("The control API does not answer. Is it running?", icon=":material/cloud_off:")
    st.caption("This page comes back by itself as soon as it does, with what was typed.")
    st.button("Try again", key="retry")

    @st.fragment(run_every=_RETRY_S)
    def look() -> None:
        if clock.monotonic() - began_s < _RETRY_S / 2:
            return  # the first look is a part of this run, and nobody would have read it
        try:
            api.session()
        except (ApiUnreachableError, ApiError):
            return
        st.rerun()

    look()
