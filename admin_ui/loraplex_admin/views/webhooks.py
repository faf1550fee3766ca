"""Who is told of alerts and invoices, and what became of every message."""

from __future__ import annotations

import json

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Page
from loraplex_admin.components import confirm, forms, one_time, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.resources import Collection, Row

_SLOT = "webhook"
_DAY_S = 86_400
_TOPICS = {
    "alert": "alerts: thresholds of limits, webhooks that fail",
    "invoice": "invoices: issued and void ones",
    "rollout": "rollouts: each step, and how they end",
}
_GRACES = {0: "at once", 3600: "in an hour", _DAY_S: "in a day", 7 * _DAY_S: "in 7 days"}


def render(api: Api, access: Access) -> None:
    """A tenant's, or with "All tenants" the operator's own."""
    st.title("Webhooks")
    choices.show_notice()
    one_time.show(_SLOT)
    is_operator = access.may("platform_webhook.read")
    tenant = choices.tenant(
        api, access, key="webhooks_tenant", action="webhook.read", allow_all=is_operator
    )
    if tenant is None and not is_operator:
        return
    hooks = api.owned(tenant, "webhooks")
    can_write = (
        access.may("webhook.write", tenant["id"])
        if tenant
        else access.may("platform_webhook.write")
    )
    zone = tenant["billing_tz"] if tenant else "UTC"
    if tenant is None:
        st.caption("The operator's own: they are told of all tenants.")
    listing = Listing(
        "webhooks",
        fetch=hooks.page,
        columns=Columns(
            lambda one: {
                "address": fmt.cell(one["url"]),
                "told of": ", ".join(one["topics"]),
                "status": one["status"],
                "what for": fmt.cell(one["description"]),
                "failing since": fmt.moment(one["failing_since"], zone),
            },
            widest=("address",),
            help={"status": "failed: switched off after three days without one success."},
        ),
        empty="Nobody is told of anything yet. "
        + ("Add an address below." if can_write else "Owners and admins add addresses."),
        search_label="Search webhooks",
    )
    open_id = listing.show()
    if can_write:
        _new_webhook(hooks, listing)
    if open_id is None:
        return
    try:
        _webhook(hooks, hooks.get(open_id), zone, listing, can_write=can_write)
    except ApiError as error:
        listing.refuse(error)


def _fields() -> tuple[Field, ...]:
    return (
        Field("url", "Address", max_chars=2000, placeholder="https://example.com/hooks"),
        Field(
            "topics",
            "Told of",
            "choices",
            options=tuple(_TOPICS),
            labels=_TOPICS,
            default=("alert",),
        ),
        Field("description", "What for", max_chars=200),
    )


def _new_webhook(hooks: Collection, listing: Listing) -> None:
    with st.expander("New webhook", icon=":material/add:", key=choices.fresh("new_webhook_box")):
        made = forms.create(
            "new_webhook",
            _fields(),
            submit="Add it",
            send=lambda body, once: hooks.create(body, once=once),
        )
    if made is not None:
        one_time.keep(
            _SLOT, made["url"], made["secret"], "It signs every message, after Standard Webhooks."
        )
        listing.go_to_start()
        listing.open(made["id"])
        st.rerun()


def _webhook(hooks: Collection, hook: Row, zone: str, listing: Listing, *, can_write: bool) -> None:
    id_ = hook["id"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(fmt.code(hook["url"]), width="content")
            status.badge(hook["status"])
        if hook["status"] == "failed":
            st.warning(
                "It was switched off after three days without one success. Enable it once its server answers."
            )
        if hook["old_secret_until"]:
            st.caption(
                f"The old secret signs too until {fmt.time(hook['old_secret_until'], zone)}."
            )
        if can_write:
            _change(hooks, hook, listing)
        st.markdown("**Deliveries**")
        deliveries = hooks.under(id_, "deliveries")
        found: list[Row] = []

        def fetch(after: str | None = None) -> Page[Row]:
            page = deliveries.page(after=after)
            found.extend(page["data"])
            return page

        open_delivery = Listing(
            "deliveries",
            fetch=fetch,
            columns=Columns(lambda one: _delivery_cells(one, zone), widest=("last error",)),
            empty="Nothing has been sent yet. Send a test message above.",
            is_main=False,
        ).show()
        delivery = next((one for one in found if one["id"] == open_delivery), None)
        if delivery is not None:
            _delivery(deliveries, delivery, can_write=can_write)


def _delivery_cells(delivery: Row, zone: str) -> dict[str, object]:
    return {
        "time": fmt.moment(delivery["occurred_at"], zone),
        "topic": delivery["topic"],
        "status": delivery["status"],
        "tries": delivery["tries"],
        "answer": "–" if delivery["last_status"] is None else str(delivery["last_status"]),
        "last error": fmt.cell(delivery["last_error"]) or "–",
        "tried next": fmt.moment(delivery["next_at"], zone),
    }


def _delivery(deliveries: Collection, delivery: Row, *, can_write: bool) -> None:
    st.markdown(f"What {fmt.code(delivery['id'])} says")
    st.code(
        json.dumps(delivery["payload"], indent=2, ensure_ascii=False),
        language=None,
        wrap_lines=True,
    )
    if can_write and st.button(
        "Send it again", key=f"replay_{delivery['id']}", icon=":material/replay:"
    ):
        deliveries.act(delivery["id"], "replay")
        choices.rerun_with_notice("It is sent again within seconds, under the same id.")


def _change(hooks: Collection, hook: Row, listing: Listing) -> None:
    id_ = hook["id"]
    with st.container(horizontal=True):
        if st.button("Send a test message", key=f"test_{id_}", icon=":material/send:"):
            hooks.act(id_, "test")
            choices.rerun_with_notice("A test message is on its way: look at its delivery below.")
        is_on = hook["status"] == "enabled"
        if st.button("Disable" if is_on else "Enable", key=f"switch_{id_}"):
            hooks.change(
                id_, {"status": "disabled" if is_on else "enabled"}, version=hook["version"]
            )
            choices.rerun_with_notice(
                "It is told nothing for now." if is_on else "It is told again."
            )
    saved = forms.edit(
        f"webhook_{id_}",
        hook,
        _fields(),
        save=lambda body, version: hooks.change(id_, body, version=version),
        reload=lambda: hooks.get(id_),
    )
    if saved is not None:
        choices.rerun_with_notice("The webhook is changed.")
    with st.expander(
        "Rotate the secret", icon=":material/autorenew:", key=choices.fresh(f"rotate_{id_}_box")
    ):
        made = forms.create(
            f"rotate_{id_}",
            (
                Field(
                    "grace_s",
                    "The old secret ends",
                    "choice",
                    options=tuple(_GRACES),
                    labels=_GRACES,
                    default=_DAY_S,
                ),
            ),
            submit="Make a new secret",
            confirm_name=hook["url"],
            send=lambda body, once: hooks.act(id_, "rotate", body, once=once),
        )
    if made is not None:
        one_time.keep(_SLOT, made["url"], made["secret"], "Both sign until the old one ends.")
        st.rerun()
    if confirm.by_name(
        "Delete this webhook",
        name=hook["url"],
        consequence="It is told nothing more, and its deliveries are gone.",
        button="Delete it",
        key=f"delete_{id_}",
    ):
        hooks.remove(id_)
        listing.open(None)
        choices.rerun_with_notice("The webhook is deleted.")
