"""The fleet at a glance, refreshed every few seconds."""

from __future__ import annotations

from typing import Any

import streamlit as st

from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api
from loraplex_admin.components import status
from loraplex_admin.components.live import live
from loraplex_admin.components.sentences import sentences
from loraplex_admin.views import alerts

_NUM_ALERTS = 5
_COLUMN_HELP = {
    "mixed": "Steps with prefill and decode together.",
    "most in a step": "The most different adapters that one step has served.",
    "in slots": "Adapters that a step can use at once.",
    "in memory": "Adapters held in host memory, a copy away from a slot.",
    "preempted": "Requests set back because the KV cache was full.",
    "RSS": "Memory of the engine's process.",
}


def render(api: Api, _access: Access) -> None:
    """Figures, then each replica."""
    st.title("Overview")

    def draw() -> None:
        _figures(api)
        _alerts(api)
        fleet = api.fleet()
        _replicas(fleet["replicas"])
        _gateways(fleet["gateways"])

    live(draw, calls=3)


def _figures(api: Api) -> None:
    now = api.overview()
    first = st.columns(5)
    first[0].metric("Requests/s", f"{now['requests_per_s']:.2f}", border=True)
    first[1].metric("Tokens/s", f"{now['tokens_per_s']:.1f}", border=True)
    first[2].metric("Running", fmt.count(now["running"]), border=True)
    first[3].metric("Waiting", fmt.count(now["waiting"]), border=True)
    first[4].metric(
        "Failed, 5 min",
        f"{fmt.count(now['recent_failed'])} of {fmt.count(now['recent_requests'])}",
        border=True,
        help="Requests of the last five minutes that ended in an error of ours; what limits refuse is none.",
    )
    second = st.columns(4)
    second[0].metric("KV cache in use", f"{now['kv_usage']:.1%}", border=True)
    second[1].metric("Resident adapters", fmt.count(now["resident_adapters"]), border=True)
    second[2].metric("Cost today", fmt.usd(now["cost_today_usd"]), border=True)
    second[3].metric(
        "Tenants · deployments",
        f"{fmt.count(now['tenants'])} · {fmt.count(now['deployments'])}",
        border=True,
    )


def _alerts(api: Api) -> None:
    page = api.of_platform("alerts").page(limit=_NUM_ALERTS)
    st.subheader("Newest alerts")
    if not page["data"]:
        st.caption("None yet.")
        return
    sentences([alerts.cells(one, "UTC") for one in page["data"]])


def _replicas(replicas: list[dict[str, Any]]) -> None:
    st.subheader("Replicas")
    if not replicas:
        st.warning(
            "No engine replica is registered: requests are answered with 503. Start one with "
            "`loraplex engine`."
        )
        return
    for replica in replicas:
        _replica(replica)


def _replica(replica: dict[str, Any]) -> None:
    stats = replica["stats"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(fmt.code(replica["replica_id"]), width="content")
            status.badge(replica["state"])
        st.caption(
            f"{fmt.code(replica['base_model'])} · {fmt.literal(replica['dtype'])} on "
            f"{fmt.literal(replica['device'])} ({fmt.literal(replica['isa'])}) · torch "
            f"{fmt.literal(replica['torch_version'])} · context "
            f"{fmt.count(replica['max_model_len'])}"
        )
        if not replica["row_rule_holds"]:
            st.warning("The row rule's self-check failed here: bits may depend on neighbours.")
        if stats is None:
            st.caption("It does not answer right now.")
            return
        st.progress(
            min(1.0, stats["kv_usage"]),
            text=f"KV cache {stats['kv_usage']:.1%} of {fmt.count(stats['kv_blocks_total'])} blocks",
        )
        st.dataframe(
            [
                {
                    "running": stats["num_running"],
                    "waiting": stats["num_waiting"],
                    "tokens/s": round(replica["generation_tokens_per_s"], 1),
                    "steps": stats["steps_total"],
                    "mixed": stats["mixed_steps_total"],
                    "most in a step": stats["max_adapters_in_step"],
                    "in slots": len(stats["adapters_resident"]),
                    "in memory": len(stats["adapters_host"]),
                    "preempted": stats["num_preemptions_total"],
                    "RSS": fmt.size(stats["rss_bytes"]),
                }
            ],
            hide_index=True,
            column_config={
                name: st.column_config.Column(help=text) for name, text in _COLUMN_HELP.items()
            },
            key=f"replica_{replica['replica_id']}",
        )


def _gateways(gateways: list[dict[str, Any]]) -> None:
    st.subheader("Gateways")
    if not gateways:
        st.warning("No gateway has reported: tenants reach nothing.")
        return
    st.dataframe(
        [
            {
                "gateway": gateway["gateway_id"],
                "started": fmt.moment(gateway["started_at"]),
                "last seen": fmt.moment(gateway["last_seen_at"]),
            }
            for gateway in gateways
        ],
        hide_index=True,
        key="gateways_table",
    )
