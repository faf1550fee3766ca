"""The engines: what each runs, how full it is, which adapters are where, what is pinned."""

from __future__ import annotations

from typing import Any

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Api, ApiError
from loraplex_admin.components import charts, forms, status
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.live import live

_LOAD_TIERS = {"store": "the store", "disk": "the copies on its disk"}
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
            _replica(replica, fleet["adapters"])

    live(draw, calls=1)
    _drift(api)
    _residency_wishes(api, access)


def _load(replicas: list[dict[str, Any]]) -> None:
    known = [(one["replica_id"], one["stats"]) for one in replicas if one["stats"] is not None]
    left, middle, right = st.columns(3)
    with left:
        charts.bars(
            [(name, stats["kv_usage"]) for name, stats in known],
            title="KV cache in use",
            unit="% of blocks",
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
            form="d",
            least_end=5.0,
        )
    with right:
        charts.bars(
            [(one["replica_id"], one["generation_tokens_per_s"]) for one in replicas],
            title="Speed",
            unit="tokens/s, last 10 s",
            empty="No replica answers.",
            key="fleet_speed",
        )


def _replica(replica: dict[str, Any], names: dict[str, list[str]]) -> None:
    id_, stats = replica["replica_id"], replica["stats"]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(fmt.code(id_), width="content")
            status.badge(replica["state"])
        st.caption(
            f"{fmt.code(replica['base_model'])} · {fmt.literal(replica['dtype'])} on "
            f"{fmt.literal(replica['device'])} ({fmt.literal(replica['isa'])}) · build "
            f"{fmt.code(fmt.digest(replica['model_fingerprint']))} · up since "
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
                fmt.count(stats["kv_blocks_free"]),
            ),
            ("Set back, KV full", fmt.count(stats["num_preemptions_total"])),
            ("Memory (RSS)", fmt.size(stats["rss_bytes"])),
        )
        for column, (label, value) in zip(st.columns(len(figures)), figures, strict=True):
            column.metric(label, value)
        _residency(replica, names)
        _load_times(stats)


def _residency(replica: dict[str, Any], names: dict[str, list[str]]) -> None:
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
                "adapter": fmt.cell(", ".join(names.get(digest, ()))) or "–",
                "digest": fmt.digest(digest),
                **{name: "●" if name in tiers else "" for name in _TIERS.values()},
            }
            for digest, tiers in sorted(digests.items(), key=lambda item: (-len(item[1]), item[0]))
        ],
        hide_index=True,
        column_config={"adapter": st.column_config.TextColumn(width="medium")},
        height=min(35 * (len(digests) + 1), 300),
        key=f"residency_{replica['replica_id']}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _load_times(stats: dict[str, Any]) -> None:
    """How long loads take by tier, and what is under way; from a store that is far it is seconds."""
    figures = (
        ("Loads", fmt.count(stats["adapter_loads_total"])),
        ("Under way", fmt.count(stats["adapters_loading"])),
        ("Failed", fmt.count(stats["adapter_load_failures_total"])),
        ("Let go", fmt.count(stats["adapter_evictions_total"])),
    )
    for column, (label, value) in zip(st.columns(len(figures)), figures, strict=True):
        column.metric(label, value)
    for tier, name in _LOAD_TIERS.items():
        times = stats["adapter_load_times"].get(tier)
        if times is not None:
            st.caption(
                f"Loads from {name}: {fmt.count(times['loads_total'])}; last {_ms(times['last_s'])}, "
                f"p50 {_ms(times['p50_s'])}, p95 {_ms(times['p95_s'])}"
            )
    st.caption(
        f"{fmt.size(stats['adapter_host_bytes'])} of adapters in memory, {fmt.count(stats['adapters_disk'])} copies "
        f"on disk ({fmt.size(stats['adapter_disk_bytes'])})"
    )


# ------------------------------------------------------------------------ what is desired


def _drift(api: Api) -> None:
    """Where the fleet is not as it is desired; silent where it is."""
    found = api.read("/fleet/drift")
    if not found["has_drift"]:
        if not found["replicas"]:
            return  # that there is none is said above
        st.success("Every replica is as it is desired.", icon=":material/check_circle:")
        return
    st.warning("The fleet is not as it is desired.", icon=":material/difference:")
    rows = [
        {
            "where": replica["replica_id"],
            "what": f"adapter {missing['digest'].removeprefix('sha256:')[:12]} is not in memory",
            "since": fmt.moment(missing["since"]),
            "why": fmt.cell(missing["reason"])
            or ("loading" if missing["is_pinned"] else "not told yet"),
        }
        for replica in found["replicas"]
        for missing in replica["missing"]
    ]
    rows += [
        {
            "where": replica["replica_id"],
            "what": "does not answer"
            if not replica["answers"]
            else "serves other weights than are named",
            "since": "–",
            "why": "–",
        }
        for replica in found["replicas"]
        if not replica["answers"] or replica["weights"] is not None
    ]
    rows += [
        {
            "where": "no replica",
            "what": f"build {build['fingerprint'][:12]} runs nowhere",
            "since": fmt.moment(build["since"]),
            "why": "wanted by "
            + ", ".join(fmt.cell(one["deployment"]) for one in build["wanted_by"]),
        }
        for build in found["builds"]
    ]
    if rows:
        st.dataframe(rows, hide_index=True, key="fleet_drift")


def _residency_wishes(api: Api, access: Access) -> None:
    residents = api.of_platform("fleet/residency")
    st.subheader("Kept in memory")
    listing = Listing(
        "residents",
        fetch=lambda after=None: residents.page(after=after),
        columns=Columns(
            lambda one: {
                "adapter": fmt.cell(f"{one['adapter_name']} v{one['version']}"),
                "digest": fmt.digest(one["digest"]),
                "why": fmt.cell(one["reason"]),
                "since": fmt.moment(one["created_at"]),
                "tenant": one["tenant_id"],
            },
            wide=("adapter", "why"),
        ),
        empty="Nothing is kept: engines hold what is used most.",
        is_main=False,
        can_open=access.may("fleet.write"),
    )
    open_id = listing.show()
    if not access.may("fleet.write"):
        return
    if open_id is not None and st.button("Let it go", key="unkeep"):
        try:
            residents.remove(open_id)
        except ApiError as error:
            choices.show_refusal(error)
            return
        listing.open(None)
        choices.rerun_with_notice("Engines evict it like any other from now on.")
    with st.expander(
        "Keep an adapter in memory", icon=":material/push_pin:", key=choices.fresh("keep_box")
    ):
        st.caption(
            "On every replica of its base, also those that start later, however seldom it is used."
        )
        told = forms.create(
            "keep",
            (
                Field("version_id", "Version (id)", max_chars=80, placeholder="ver_…"),
                Field("reason", "Why", max_chars=500, placeholder="acme's launch"),
            ),
            submit="Keep it",
            check=lambda body: (
                None
                if body["version_id"]
                else "Write the version's id: the *Adapters* page has it."
            ),
            send=lambda body, _once: residents.put(body["version_id"], {"reason": body["reason"]}),
        )
    if told is not None:
        refused = [one for one in told["replicas"] if one["refusal"] is not None]
        choices.rerun_with_notice(
            f"{len(told['replicas']) - len(refused)} of {len(told['replicas'])} replicas keep it."
            + "".join(
                f" {fmt.code(one['replica_id'])}: {fmt.literal(one['message'] or '')}"
                for one in refused
            )
        )
