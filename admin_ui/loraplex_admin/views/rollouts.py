"""Rollouts: how a new revision comes to answer, both sides of it in numbers, and the way back."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Tenant
from loraplex_admin.components import charts, confirm, forms, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.live import live
from loraplex_admin.components.sentences import sentences
from loraplex_admin.resources import Collection, Row

_BP = 10_000
_ACTIVE = ("evaluating", "shadow", "canary")
_STEPPING = ("shadow", "canary")
_STATES = {
    "draft": "draft",
    "evaluating": "evaluating",
    "shadow": "shadow",
    "canary": "canary",
    "promoted": "promoted",
    "aborted": "aborted",
    "rolled_back": "rolled back",
}
_STICKY = {
    "key": "an API key",
    "user": "a user, as requests name them",
    "conversation": "a conversation",
    "tenant": "the whole tenant",
}
_MINUTE_S = 60


def render(api: Api, access: Access) -> None:
    """The list, a form for a draft, then the one that is open."""
    st.title("Rollouts")
    choices.show_notice()
    is_operator = access.may("platform_rollout.read")
    left, right = st.columns(2)
    with left:
        tenant = choices.tenant(
            api, access, key="rollouts_tenant", action="rollout.read", allow_all=is_operator
        )
    if tenant is None and not is_operator:
        return
    if tenant is None:
        st.caption("The platform's own: of the base model that all tenants reach.")
        can_write, zone = access.may("platform_rollout.write"), "UTC"
    else:
        can_write, zone = access.may("rollout.write", tenant["id"]), tenant["billing_tz"]
    rollouts = api.owned(tenant, "rollouts")
    with right:
        wanted = choices.filtered("State", _STATES, name="state")
    listing = Listing(
        "rollouts",
        fetch=lambda **query: rollouts.page(state=wanted, **query),
        columns=Columns(
            lambda one: {
                "deployment": fmt.cell(one["deployment"]),
                "from": f"revision {one['stable_number']}",
                "to": f"revision {one['canary_number']}",
                "state": _state(one),
                "step": _step_of(one),
                "canary's share": f"{_share_of(one):.2%}",
                "began": fmt.moment(one["started_at"], zone),
                "ended": fmt.moment(one["ended_at"], zone),
            },
            numbers=("canary's share",),
        ),
        search_label="Search rollouts",
        empty="No rollout is so. Choose *any* state."
        if wanted
        else "Nothing was rolled out yet. "
        + (
            "Make a deployment and a second revision of it under *Deployments*, then a draft here."
            if can_write
            else "Its developers begin one."
        ),
    )
    open_id = listing.show()
    if can_write:
        _new_rollout(api, tenant, listing)
    if open_id is None:
        return
    try:
        rollout = rollouts.get(open_id)
    except ApiError as error:
        listing.refuse(error)
        return
    with st.container(border=True):
        if rollout["state"] in _ACTIVE:
            # The rollout and both sides' figures.
            live(lambda: _follow(rollouts, rollout, zone), calls=2, every_s=4.0)
        else:
            _watch(rollouts, rollout, zone)
        if can_write:
            _buttons(rollouts, rollout)
        _events(rollouts, rollout, zone)


def _state(rollout: Row) -> str:
    return f"{rollout['state'].replace('_', ' ')}{' (paused)' if rollout['is_paused'] else ''}"


def _step_of(rollout: Row) -> str:
    if rollout["step"] is None:
        return "–"
    return f"{rollout['step'] + 1} of {len(rollout['steps'])}"


def _share_of(rollout: Row) -> float:
    return 1.0 if rollout["state"] == "promoted" else float(rollout["weight_bp"] / _BP)


def _say_step(step: Row) -> str:
    if step["kind"] == "shadow":
        return f"shadow of {step['share_bp'] / _BP:.1%} of the requests"
    return f"canary for {step['weight_bp'] / _BP:.1%} of the subjects"


# ------------------------------------------------------------------------------------- new


def _new_rollout(api: Api, tenant: Tenant | None, listing: Listing) -> None:
    rollouts = api.owned(tenant, "rollouts")
    deployments = api.owned(tenant, "deployments")
    if not deployments.page(limit=1)["data"]:
        return  # the empty list says what comes first
    with st.expander("New rollout", icon=":material/add:", key=choices.fresh("new_rollout_box")):
        rows = choices.from_many("deployments", deployments.page, key="new_rollout_deployment")
        names = [one["name"] for one in rows]
        made = forms.create(
            "new_rollout",
            (
                Field("deployment", "Deployment", "choice", options=names),
                Field(
                    "canary",
                    "New revision (number)",
                    "whole",
                    help="Empty: the newest one.",
                    is_optional=True,
                ),
                Field(
                    "weights",
                    "Canary steps in percent",
                    "lines",
                    default=["1", "5", "25", "50"],
                    help="One a line, growing. The last step after them is the promotion.",
                ),
                Field(
                    "shadow",
                    "Shadow first, percent of the requests",
                    "whole",
                    default=10,
                    help="0: no shadow step.",
                ),
                Field("hold_min", "Each step at least (minutes)", "whole", default=10),
                Field(
                    "sticky_by",
                    "Who stays with one side",
                    "choice",
                    options=tuple(_STICKY),
                    labels=_STICKY,
                ),
                Field(
                    "promotion",
                    "After the last step",
                    "choice",
                    options=("automatic", "approval"),
                    labels={
                        "automatic": "promote by itself, if the gates pass",
                        "approval": "wait until somebody promotes",
                    },
                ),
            ),
            submit="Make a draft",
            send=lambda body, once: rollouts.create(_body(body), once=once),
        )
    if made is not None:
        listing.go_to_start()
        listing.open(made["id"])
        choices.rerun_with_notice("The draft is there. Nothing happens before it is started.")


def _body(form: Row) -> Row:
    hold_s = int(form["hold_min"] or 0) * _MINUTE_S
    steps: list[Row] = []
    if form.get("shadow"):
        steps.append({"kind": "shadow", "share_bp": int(form["shadow"]) * 100, "hold_s": hold_s})
    for line in form["weights"]:
        try:
            weight_bp = round(float(line.rstrip(" %")) * 100)
        except ValueError as error:
            raise ApiError(
                "Write percents, one a line, such as 5 or 0.5.",
                status=400,
                code="invalid_request",
                param="steps",
            ) from error
        steps.append({"kind": "canary", "weight_bp": weight_bp, "hold_s": hold_s})
    body = {name: form[name] for name in ("deployment", "sticky_by", "promotion")}
    return body | {"steps": steps} | ({"canary": form["canary"]} if "canary" in form else {})


# ----------------------------------------------------------------------------------- watch


def _follow(rollouts: Collection, drawn: Row, zone: str) -> None:
    """What is now; where its state is another one than the page was drawn with, all of the page anew: other buttons fit."""
    rollout = rollouts.get(drawn["id"])
    if any(rollout[name] != drawn[name] for name in ("state", "step", "is_paused")):
        st.rerun()
    _watch(rollouts, rollout, zone)


def _watch(rollouts: Collection, rollout: Row, zone: str) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(fmt.literal(rollout["deployment"]))
        status.badge(rollout["state"])
        if rollout["is_paused"]:
            status.badge("paused")
    st.caption(
        f"{fmt.code(rollout['id'])} · revision {rollout['stable_number']} (stable) to "
        f"{rollout['canary_number']} (canary) · stays with one side: {_STICKY.get(rollout['sticky_by'], rollout['sticky_by'])}"
    )
    if rollout["changes"]:
        st.markdown(
            "Between them differ: " + ", ".join(fmt.code(name) for name in rollout["changes"])
        )
    for warning in rollout["warnings"]:
        st.warning(fmt.literal(warning))
    if rollout["end_reason"]:
        st.info(
            f"It ended {fmt.time(rollout['ended_at'], zone)}: {fmt.literal(rollout['end_reason'])}"
        )
    canary = _share_of(rollout)
    charts.split(
        [
            (f"stable (revision {rollout['stable_number']})", 1 - canary),
            (f"canary (revision {rollout['canary_number']})", canary),
        ],
        title="Who answers",
        key=f"split_{rollout['id']}",
    )
    _steps(rollout, zone)
    if rollout["step"] is not None:
        try:
            _sides(rollouts.part(rollout["id"], "metrics"))
        except ApiError as error:
            if error.status != 404:
                raise
            st.caption("No step has begun yet, so there are no figures.")


def _steps(rollout: Row, zone: str) -> None:
    rows = []
    for number, step in enumerate(rollout["steps"]):
        is_now = number == rollout["step"] and rollout["state"] in _STEPPING
        since = rollout["step_began_at"] if is_now else None
        rows.append(
            {
                " ": "▶"
                if is_now
                else "✓"
                if rollout["step"] is not None and number < rollout["step"]
                else "",
                "step": _say_step(step),
                "at least": fmt.span(step["hold_s"]),
                "since": fmt.moment(since, zone),
                "may go on": fmt.reset(since + step["hold_s"], zone, clock.time())
                if since
                else "–",
            }
        )
    sentences(rows)


_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("subjects", "num_subjects", fmt.count),
    ("share of subjects", "subject_share", lambda v: f"{v:.2%}"),
    ("requests", "num_requests", fmt.count),
    ("share of requests", "request_share", lambda v: f"{v:.2%}"),
    ("tokens", "num_tokens", fmt.count),
    ("errors", "error_rate", lambda v: f"{v:.2%}"),
    ("callers who left", "abort_rate", lambda v: f"{v:.2%}"),
    ("first token, median ms", "ttft_p50_ms", lambda v: f"{v:,.0f}"),
    ("first token, p95 ms", "ttft_p95_ms", lambda v: f"{v:,.0f}"),
    ("between tokens, median ms", "itl_p50_ms", lambda v: f"{v:,.1f}"),
    ("between tokens, p95 ms", "itl_p95_ms", lambda v: f"{v:,.1f}"),
    ("tokens an answer", "mean_output_tokens", lambda v: f"{v:,.1f}"),
    ("likelihood under stable, nats a token", "mean_logprob", lambda v: f"{v:.4f}"),
)


def _sides(metrics: Row) -> None:
    """Both sides of the step, one row a figure; then what each gate says of them."""
    sides = (metrics["stable"], metrics["canary"])
    st.markdown(f"**Both sides of step {metrics['step'] + 1}**")
    if not any(side["num_requests"] for side in sides):
        st.info("Nobody has asked since the step began: figures come with the first requests.")
        return
    other = "shadow (nobody saw it)" if metrics["kind"] == "shadow" else "canary"
    st.dataframe(
        [
            {
                "figure": label,
                "stable": _figure(sides[0][name], form),
                other: _figure(sides[1][name], form),
            }
            for label, name, form in _FIGURES
        ],
        hide_index=True,
        height="content",
        column_config={
            side: st.column_config.TextColumn(alignment="right") for side in ("stable", other)
        },
        key="rollout_sides",
    )
    if not metrics["gates"]:
        return
    sentences(
        [
            {
                "gate": gate["gate"].replace("_", " "),
                "says": gate["verdict"],
                "in words": gate["summary"].removeprefix(f"{gate['gate']}: "),
            }
            for gate in metrics["gates"]
        ]
    )


def _figure(value: Any, form: Callable[[Any], str]) -> str:  # noqa: ANN401 (a number of any kind)
    return "–" if value is None else form(value)


def _events(rollouts: Collection, rollout: Row, zone: str) -> None:
    with st.expander("What happened", icon=":material/history:", key="events_box", expanded=True):
        events = rollouts.under(rollout["id"], "events")
        Listing(
            "events",
            fetch=lambda after=None: events.page(after=after),
            columns=Columns(
                lambda one: {
                    "time": fmt.moment(one["at"], zone),
                    "what": one["kind"].replace("_", " "),
                    "who": one["actor"],
                    "in words": one["message"],
                }
            ),
            empty="Nothing has happened to it yet.",
            is_main=False,
            can_open=False,
            wraps=True,
        ).show()


# --------------------------------------------------------------------------------- buttons


def _buttons(rollouts: Collection, rollout: Row) -> None:
    id_, state, name = rollout["id"], rollout["state"], rollout["deployment"]

    def act(verb: str, notice: str, reason: str | None = None) -> None:
        body = None if reason is None else {"reason": reason}
        try:
            rollouts.act(id_, verb, body, version=None if state in _ACTIVE else rollout["version"])
        except ApiError as error:
            choices.show_refusal(error)
            return
        choices.rerun_with_notice(notice)

    with st.container(horizontal=True):
        if state == "draft" and st.button("Start", type="primary", key=f"start_{id_}"):
            act("start", "It has begun: its canary is loaded and judged first.")
        if state in _ACTIVE:
            if rollout["is_paused"]:
                if st.button("Go on", key=f"resume_{id_}"):
                    act("resume", "It goes on by itself.")
            elif st.button("Pause", key=f"pause_{id_}"):
                act("pause", "It goes no step further. Gates that fail still abort it.")
    if state in _STEPPING:
        if confirm.by_name(
            "Abort: the stable revision answers everything",
            name=name,
            consequence="From the next request on nobody gets the canary. Streams in flight finish as they began.",
            button="Abort it",
            key=f"abort_{id_}",
        ):
            act(
                "abort",
                f"{fmt.code(name)} answers with its stable revision.",
                "aborted in the console",
            )
        if confirm.by_name(
            "Promote: the canary answers everything",
            name=name,
            consequence="From the next request on, whatever steps are left and whatever the gates say.",
            button="Promote it",
            key=f"promote_{id_}",
        ):
            act(
                "promote",
                f"{fmt.code(name)} answers with the new revision.",
                "promoted in the console",
            )
    elif state == "evaluating" and confirm.by_name(
        "Abort: it never begins",
        name=name,
        consequence="The canary has answered nobody yet.",
        button="Abort it",
        key=f"abort_{id_}",
    ):
        act("abort", "It is aborted.", "aborted in the console")
    elif state == "promoted" and confirm.by_name(
        "Roll back: undo this promotion",
        name=name,
        consequence="Its stable revision answers again from the next request on, whole: adapter, engine build, parameters "
        "and prices.",
        button="Roll it back",
        key=f"rollback_{id_}",
    ):
        act(
            "rollback",
            f"{fmt.code(name)} is back at its stable revision.",
            "rolled back in the console",
        )
