"""Evals: suites of cases, their runs, what each case said, two runs beside each other, and a suite over time."""

from __future__ import annotations

import json
from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError, Page, Tenant
from loraplex_admin.components import address, charts, confirm, forms, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.live import live
from loraplex_admin.resources import Row
from loraplex_admin.views import eval_schedules

_RUNNING = ("queued", "running")
_RUN_STATES = (*_RUNNING, "passed", "failed", "error", "timeout", "cancelled")
_MAX_FILE_BYTES = 4 << 20


def render(api: Api, access: Access) -> None:
    """Suites and their course, then runs and the one that is open."""
    st.title("Evals")
    choices.show_notice()
    tenant = choices.tenant(api, access, key="evals_tenant", action="eval.read")
    if tenant is None:
        return
    can_write = access.may("eval.write", tenant["id"])
    suites = _suites(api, tenant, can_write=can_write)
    _runs(api, tenant, suites, can_write=can_write)
    eval_schedules.show(api, tenant, suites, can_write=can_write)


# ---------------------------------------------------------------------------------- suites


def _suites(api: Api, tenant: Tenant, *, can_write: bool) -> dict[str, str]:
    """The list; names by id, of the newest hundred."""
    suites, zone = api.of_tenant(tenant["id"], "eval-suites"), tenant["billing_tz"]
    st.subheader("Suites")
    listing = Listing(
        "suites",
        fetch=suites.page,
        columns=Columns(
            lambda one: {
                "name": fmt.cell(one["name"]),
                "kind": one["kind"],
                "version": str(one["version"]),
                "cases": str(one["num_cases"]),
                "of": one["owner"],
                "changed": fmt.moment(one["version_created_at"], zone),
            },
            numbers=("version", "cases"),
            wide=("name",),
        ),
        search_label="Search suites",
        empty="No suite yet. "
        + (
            "Bring a file of cases below, one line of JSON each."
            if can_write
            else "Its developers bring one."
        ),
        is_main=False,
    )
    open_id = listing.show()
    if can_write:
        _new_suite(api, tenant, listing)
    if open_id is not None:
        try:
            _suite(api, tenant, suites.get(open_id), listing, can_write=can_write)
        except ApiError as error:
            listing.refuse(error)
    return {one["id"]: one["name"] for one in suites.page(limit=choices.MAX_CHOICES)["data"]}


def _new_suite(api: Api, tenant: Tenant, listing: Listing) -> None:
    suites = api.of_tenant(tenant["id"], "eval-suites")
    with (
        st.expander(
            "New suite, or a suite's next version",
            icon=":material/add:",
            key=choices.fresh("new_suite_box"),
        ),
        st.form("new_suite", border=False),
    ):
        name = st.text_input(
            "Name", max_chars=64, placeholder="capitals", key=choices.fresh("new_suite_name")
        )
        file = st.file_uploader(
            "Cases, one line of JSON each", type=["jsonl"], key=choices.fresh("new_suite_file")
        )
        st.caption(
            'A case: `{"id": "france", "messages": [{"role": "user", "content": "Capital of France?"}], '
            '"checks": [{"type": "contains", "value": "Paris"}]}`'
        )
        if not st.form_submit_button("Bring it", type="primary", key="new_suite_go"):
            return
        if file is None or not name.strip():
            st.error("Still missing: a name and a file.", icon=":material/error:")
            return
        if file.size > _MAX_FILE_BYTES:
            st.error(
                f"The file has {fmt.size(file.size)}; the page takes {fmt.size(_MAX_FILE_BYTES)}. Use "
                "`loraplex eval import`.",
                icon=":material/error:",
            )
            return
        try:
            body = {"name": name.strip(), "lines": _lines(file.getvalue())}
            made = suites.create(body, once=forms.once("new_suite", body))
        except ApiError as error:
            choices.show_refusal(error)
            return
    forms.done("new_suite")
    choices.empty("new_suite_name", "new_suite_file")
    listing.go_to_start()
    choices.rerun_with_notice(
        f"{fmt.code(made['name'])} is at version {made['version']}: {made['num_cases']} cases."
    )


def _lines(content: bytes) -> list[Any]:
    """As the API takes them: null for an empty line, so that its errors count lines as an editor does."""
    found = []
    for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
        try:
            found.append(json.loads(line) if line.strip() else None)
        except ValueError as error:
            raise ApiError(
                f"Line {number} of the file is not JSON: write one object a line.",
                status=400,
                code="invalid_request",
                param="lines",
            ) from error
    return found


def _suite(api: Api, tenant: Tenant, suite: Row, listing: Listing, *, can_write: bool) -> None:
    with st.container(border=True):
        st.markdown(
            f"**{fmt.literal(suite['name'])}** · version {suite['version']} · {fmt.code(suite['sha256'][:12])}"
        )
        series = api.read(f"/tenants/{tenant['id']}/eval-series", suite_id=suite["id"])["data"]
        charts.lines(
            [
                {
                    "at": one["ended_at"],
                    "score": one["score"],
                    "revision": _say_revision(one),
                }
                for one in series
            ],
            x="at",
            y="score",
            series="revision",
            title="Score over time, by revision",
            unit="% of weights that passed",
            empty="A line needs two finished runs. Start one below.",
            key="suite_series",
            form=".0%",
            zone=tenant["billing_tz"],
            domain=(0.0, 1.0),
        )
        _newest(series, tenant["billing_tz"])
        if (
            can_write
            and suite["owner"] == "tenant"
            and confirm.by_name(
                "Delete this suite",
                name=suite["name"],
                consequence="It runs no more, and schedules of it end. Finished runs stay.",
                button="Delete it",
                key=f"delete_{suite['id']}",
            )
        ):
            api.of_tenant(tenant["id"], "eval-suites").remove(suite["id"])
            listing.open(None)
            choices.rerun_with_notice(f"{fmt.code(suite['name'])} is deleted.")


def _say_revision(point: Row) -> str:
    return f"{fmt.cell(point['deployment'])}, revision {point['revision']}"


def _newest(series: list[Row], zone: str) -> None:
    """Of each revision the newest run, to be read off: a chart shows the course."""
    newest = {_say_revision(one): one for one in series}
    if not newest:
        return
    st.dataframe(
        [
            {
                "revision": name,
                "score": "–" if one["score"] is None else f"{one['score']:.1%}",
                "state": one["state"],
                "suite": f"v{one['suite_version']}",
                "ended": fmt.moment(one["ended_at"], zone),
                "run": one["run_id"],
            }
            for name, one in reversed(newest.items())
        ],
        hide_index=True,
        column_config={"score": st.column_config.TextColumn(alignment="right")},
        key="suite_newest",
    )


# ------------------------------------------------------------------------------------ runs


def _runs(api: Api, tenant: Tenant, suites: dict[str, str], *, can_write: bool) -> None:
    st.subheader("Runs")
    runs, zone = api.of_tenant(tenant["id"], "eval-runs"), tenant["billing_tz"]
    wanted = choices.filtered("State", {name: name for name in _RUN_STATES}, name="state")
    listing = Listing(
        "runs",
        fetch=lambda **query: runs.page(state=wanted, **query),
        columns=Columns(
            lambda one: {
                "suite": f"{fmt.cell(one['suite'])} v{one['suite_version']}",
                "state": one["state"],
                "score": "–" if one["score"] is None else f"{one['score']:.1%}",
                "cases": _counts(one),
                "engines": "mixed"
                if one["has_mixed_engines"]
                else "one build"
                if one["fingerprints"]
                else "–",
                "began": fmt.moment(one["started_at"], zone),
                "revision": one["revision_id"],
            },
            numbers=("score",),
            wide=("suite",),
        ),
        search_label="Search runs",
        empty="No run is so. Choose *any* state."
        if wanted
        else "Nothing has run yet. "
        + ("Start a run below." if suites and can_write else "First there must be a suite."),
    )
    open_id = listing.show()
    if can_write and suites:
        _new_run(api, tenant, listing)
    if open_id is None:
        return
    try:
        run = runs.get(open_id)
    except ApiError as error:
        listing.refuse(error)
        return
    with st.container(border=True):
        if run["state"] in _RUNNING:
            live(lambda: _progress(runs.get(open_id)), calls=1)
            if can_write and st.button("Cancel this run", key=f"cancel_{open_id}"):
                runs.act(open_id, "cancel")
                choices.rerun_with_notice("The run is cancelled: what was answered stays.")
        else:
            _progress(run)
        _results(api, tenant, run)
        _compare(api, tenant, run)


def _counts(run: Row) -> str:
    said = ", ".join(f"{number} {name}" for name, number in sorted(run["counts"].items()))
    return f"{said or 'none yet'} of {run['num_cases']}"


def _progress(run: Row) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(f"**{fmt.literal(run['suite'])}** v{run['suite_version']}", width="content")
        status.badge(run["state"])
    num_done = sum(run["counts"].values())
    share = num_done / run["num_cases"] if run["num_cases"] else 1.0
    st.progress(min(1.0, share), text=f"{num_done} of {run['num_cases']} cases")
    if run["error"]:
        st.error(fmt.literal(run["error"]), icon=":material/error:")
    if run["has_mixed_engines"]:
        st.warning("Engines of different builds answered: bits may differ for that reason.")
    if run["score"] is not None:
        st.metric("Score", f"{run['score']:.1%}")


def _new_run(api: Api, tenant: Tenant, listing: Listing) -> None:
    runs = api.of_tenant(tenant["id"], "eval-runs")
    deployments = api.of_tenant(tenant["id"], "deployments")
    if not deployments.page(limit=1)["data"]:
        st.info(
            "A run asks a deployment; there is none yet. Deploy something first.",
            icon=":material/lightbulb:",
        )
        return
    with st.expander("New run", icon=":material/play_arrow:", key=choices.fresh("new_run_box")):
        rows = choices.from_many("deployments", deployments.page, key="new_run_deployment")
        names = [one["name"] for one in rows]
        all_suites = api.of_tenant(tenant["id"], "eval-suites")
        rows = choices.from_many("suites", all_suites.page, key="new_run_suite")
        suites = {one["id"]: one["name"] for one in rows}
        made = forms.create(
            "new_run",
            (
                Field("suite_id", "Suite", "choice", options=tuple(suites), labels=suites),
                Field("deployment", "Deployment", "choice", options=names),
                Field(
                    "baseline_revision_id",
                    "Compare with this revision",
                    max_chars=80,
                    placeholder="rev_…",
                    help="Its answers stand beside, for pairwise checks.",
                    is_optional=True,
                ),
                Field("concurrency", "At a time", "whole", default=4),
            ),
            submit="Run it",
            send=lambda body, once: runs.create(body, once=once),
        )
    if made is not None:
        listing.go_to_start()
        listing.open(made["id"])
        choices.rerun_with_notice(
            "The run is queued: its requests are answered after everybody else's, and not billed."
        )


def _results(api: Api, tenant: Tenant, run: Row) -> None:
    results = api.of_tenant(tenant["id"], "eval-runs").under(run["id"], "results")
    found: list[Row] = []

    def fetch(after: str | None = None) -> Page[Row]:
        page = results.page(after=after)
        found.extend(page["data"])
        return page

    open_id = Listing(
        "results",
        fetch=fetch,
        columns=Columns(
            lambda one: {
                "case": fmt.cell(one["case_id"]),
                "status": one["status"],
                "why": fmt.cell(one["reason"]),
                "tokens": "–"
                if one["completion_tokens"] is None
                else str(one["completion_tokens"]),
                "first ms": "–" if one["ttft_ms"] is None else f"{one['ttft_ms']:.0f}",
                "total ms": "–" if one["e2e_ms"] is None else f"{one['e2e_ms']:.0f}",
            },
            numbers=("tokens", "first ms", "total ms"),
            wide=("case", "why"),
        ),
        empty="No case has an answer yet.",
        is_main=False,
        has_all=True,
    ).show()
    result = next((one for one in found if one["id"] == open_id), None)
    if result is None:
        return
    answers = [("answer", result["output"]), ("baseline", result["baseline_output"])]
    shown = [(who, text) for who, text in answers if text is not None]
    for column, (who, text) in zip(st.columns(max(1, len(shown))), shown, strict=False):
        with column.container(border=True):
            st.caption(who)
            st.text(text or "(nothing)")
    if result["checks"]:
        st.code(
            json.dumps(result["checks"], indent=2, ensure_ascii=False),
            language=None,
            wrap_lines=True,
        )


def _compare(api: Api, tenant: Tenant, run: Row) -> None:
    """Beside another run of the same suite, case by case."""
    runs = api.of_tenant(tenant["id"], "eval-runs")
    others = {
        one[
            "id"
        ]: f"{one['state']} · {fmt.time(one['created_at'], tenant['billing_tz'])} · {one['revision_id']}"
        for one in runs.page(suite_id=run["suite_id"])["data"]
        if one["id"] != run["id"]
    }
    if not others:
        st.caption("A second run of this suite can be compared with this one.")
        return
    known = address.get("with")
    chosen = st.selectbox(
        "Compare with",
        ["", *others],
        index=[*others].index(known) + 1 if known in others else 0,
        format_func=lambda id_: others.get(id_, "nothing"),
        key=f"compare_{run['id']}",
    )
    address.put(**{"with": chosen or None})
    if not chosen:
        return
    found = runs.part(run["id"], "compare", **{"with": chosen})
    columns = st.columns(4)
    columns[0].metric("In both", fmt.count(found["num_shared"]), border=True)
    columns[1].metric("Same words", fmt.count(found["same_output"]), border=True)
    columns[2].metric("Passed here only", fmt.count(len(found["broken"])), border=True)
    columns[3].metric("Passed there only", fmt.count(len(found["mended"])), border=True)
    st.caption(
        f"A difference so large comes by chance with probability {found['mcnemar_p']:.3g} (McNemar, exact)."
    )
    for kind, title in (("broken", "Passed here, not there"), ("mended", "Passed there, not here")):
        for flip in found[kind]:
            with st.expander(f"{title}: {fmt.code(flip['case_id'])}", icon=":material/difference:"):
                for column, side, name in zip(
                    st.columns(2), ("first", "second"), ("here", "there"), strict=True
                ):
                    with column.container(border=True):
                        st.caption(
                            f"{name} · {flip[f'{side}_status']} · {fmt.literal(flip[f'{side}_reason'])}"
                        )
                        st.text(flip[f"{side}_output"] or "(nothing)")
