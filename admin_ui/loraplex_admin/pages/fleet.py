"""The engines: what each runs, how full it is, which adapters are where, what is pinned."""

from __future__ import annotations

from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError
from loraplex_admin.components import charts, status
from loraplex_admin.components.live import live

_TIERS = {
    "adapters_resident": "in slots",
    "adapters_host": "in memory",
    "adapters_pinned": "pinned",
}


def render(api: Api, access: Access) -> None:
    """Live figures of every replica; below, what the operator can do to them."""
    st.title("Fleet")
    choices.show_notice()

    def draw() -> None:
        fleet = api.fleet()
        if not fleet["replicas"]:
            st.warning(
                "No engine replica is registered: requests are answered with 503. Start one with "
                "`loraplex engine`."
            )
            return
        _load(fleet["replicas"])
        for replica in fleet["replicas"]:
            _replica(replica)

    live(draw, calls=1)
    if access.may("fleet.write"):
        _pins(api)


def _load(replicas: list[dict[str, Any]]) -> None:
    known = [(one["replica_id"], one["stats"]) for one in replicas if one["stats"] is not None]
    left, middle, right = st.columns(3)
    with left:
        charts.bars(
            [(name, stats["kv_usage"]) for name, stats in known],
            title="KV cache in use",
            unit="share of blocks",
            empty="No replica answers.",
            key="fleet_kv",
            form="%",
        )
    with middle:
        charts.bars(
            [(name, stats["num_waiting"]) for name, stats in known],
            title="Queue",
            unit="requests waiting",
            empty="No replica answers.",
            key="fleet_queue",
        )
    with right:
        charts.bars(
            [(one["replica_id"], one["generation_tokens_per_s"]) for one in replicas],
            title="Speed",
            unit="tokens/s, last 10 s",
            empty="No replica answers.",
            key="fleet_speed",
        )


def _replica(replica: dict[str, Any]) -> None:
    id_, stats = replica["replica_id"], replica["stats"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(fmt.code(id_), width="content")
            status.badge(replica["state"])
        st.caption(
            f"{fmt.code(replica['base_model'])} · {fmt.literal(replica['dtype'])} on "
            f"{fmt.literal(replica['device'])} ({fmt.literal(replica['isa'])}) · build "
            f"{fmt.code(replica['model_fingerprint'][:12])} · up since "
            f"{fmt.time(int(replica['started_at_unix_s']))}"
        )
        if not replica["row_rule_holds"]:
            st.warning("The row rule's self-check failed here: bits may depend on neighbours.")
        if stats is None:
            st.info("It does not answer right now: it may be starting, or gone. Its log says more.")
            return
        figures = (
            ("Running", fmt.count(stats["num_running"])),
            ("Waiting", fmt.count(stats["num_waiting"])),
            (
                "KV blocks free",
                f"{fmt.count(stats['kv_blocks_free'])} of {fmt.count(stats['kv_blocks_total'])}",
            ),
            ("Set back, KV full", fmt.count(stats["num_preemptions_total"])),
            ("Memory (RSS)", fmt.size(stats["rss_bytes"])),
        )
        for column, (label, value) in zip(st.columns(len(figures)), figures, strict=True):
            column.metric(label, value)
        _residency(replica)
        _load_times(replica)


def _residency(replica: dict[str, Any]) -> None:
    """Which adapter is in which tier: slots serve a step, host memory is a copy away from one."""
    stats = replica["stats"]
    digests: dict[str, set[str]] = {}
    for tier, name in _TIERS.items():
        for digest in stats.get(tier) or ():
            digests.setdefault(digest, set()).add(name)
    st.markdown(
        f"**Adapters** ({len(stats['adapters_resident'])} of {replica['max_loras']} slots, "
        f"{len(stats['adapters_host'])} in memory)"
    )
    if not digests:
        st.caption("None is loaded yet: the first request of one loads it.")
        return
    st.dataframe(
        [
            {
                "digest": digest.removeprefix("sha256:")[:16],
                **{name: "●" if name in tiers else "" for name in _TIERS.values()},
            }
            for digest, tiers in sorted(digests.items(), key=lambda item: (-len(item[1]), item[0]))
        ],
        hide_index=True,
        height=min(35 * (len(digests) + 1), 300),
        key=f"residency_{replica['replica_id']}",
    )


def _load_times(replica: dict[str, Any]) -> None:
    """Where the engine tells them."""
    loads = replica["stats"].get("adapter_load_ms")
    if not loads:
        return
    st.dataframe(
        [{"load of an adapter": name, "ms": f"{value:,.0f}"} for name, value in loads.items()],
        hide_index=True,
        key=f"loads_{replica['replica_id']}",
    )


def _pins(api: Api) -> None:
    with st.expander("Keep an adapter in memory", icon=":material/push_pin:", key="pin_box"):
        st.caption(
            "On every replica, however seldom it is used. Its digest is on the *Adapters* page."
        )
        digest = st.text_input(
            "Digest", max_chars=71, placeholder="sha256:…", key="pin_digest"
        ).strip()
        with st.container(horizontal=True):
            is_wanted = st.button("Keep it", type="primary", key="pin_go")
            is_let_go = st.button("Let it go", key="unpin_go")
        if not is_wanted and not is_let_go:
            return
        pins = api.of_platform("fleet/pins")
        try:
            if is_wanted:
                answer = pins.put(digest, {})
            else:
                answer = api.send("DELETE", f"/fleet/pins/{digest}")
        except ApiError as error:
            choices.show_refusal(error)
            return
        st.dataframe(
            [
                {
                    "replica": one["replica_id"],
                    "keeps": "–" if one["pinned"] is None else len(one["pinned"]),
                    "says": fmt.cell(one["message"]) or "done",
                }
                for one in answer["replicas"]
            ],
            hide_index=True,
            key="pin_answers",
        )
