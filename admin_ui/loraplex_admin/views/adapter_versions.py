"""One adapter: its versions with their reports, what names each, the aliases, and retiring."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Adapter, AdapterVersion, Api, ApiError, Tenant
from loraplex_admin.components import confirm, forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.sentences import sentences
from loraplex_admin.resources import Collection


def show(api: Api, tenant: Tenant, adapter: Adapter, *, can_write: bool) -> None:
    """The one that is open."""
    zone = tenant["billing_tz"]
    adapters = api.of_tenant(tenant["id"], "adapters")
    with st.container(border=True):
        st.subheader(fmt.literal(adapter["name"]))
        _aliases(adapters.under(adapter["id"], "aliases"), adapter, zone, can_write=can_write)
        for number, version in enumerate(adapter["versions"]):
            with st.expander(
                f"Version {version['version']} · {fmt.literal(version['status'])}",
                icon=":material/layers:",
                expanded=number == 0,
            ):
                st.caption(
                    f"{fmt.code(version['id'])} · {fmt.code(version['digest'])}  \nrank {version['rank']} · "
                    f"{fmt.size(version['size_bytes'])} · "
                    f"{', '.join(fmt.code(module) for module in version['target_modules'])} · "
                    f"{fmt.time(version['created_at'], zone)}"
                )
                report(version, key=version["id"])
                versions = adapters.under(adapter["id"], "versions")
                _uses(versions, adapter, version, can_write=can_write)


def _aliases(aliases: Collection, adapter: Adapter, zone: str, *, can_write: bool) -> None:
    st.markdown("**Aliases**")
    open_alias = Listing(
        "aliases",
        fetch=lambda after=None: aliases.page(after=after),
        columns=Columns(
            lambda one: {
                "alias": fmt.cell(one["alias"]),
                "names": f"version {one['version']}",
                "digest": fmt.digest(one["digest"]),
                "since": fmt.moment(one["updated_at"], zone),
            },
            wide=("alias",),
        ),
        empty="No alias names one of its versions. A deployment that follows one moves with it.",
        is_main=False,
    ).show()
    if open_alias is not None:
        events = aliases.under(open_alias, "events").page()["data"]
        names = {version["id"]: f"version {version['version']}" for version in adapter["versions"]}
        st.dataframe(
            [
                {
                    "from then on": fmt.moment(one["at"], zone),
                    f"{fmt.cell(open_alias)} named": names.get(
                        one["version_id"] or "", "nothing: it was deleted"
                    ),
                }
                for one in events
            ],
            hide_index=True,
            key="alias_events",
        )
        if can_write and confirm.by_name(
            "Take this alias away",
            name=open_alias,
            consequence="It names nothing any more. Refused while a deployment follows it.",
            button="Take it away",
            key="unalias",
        ):
            try:
                aliases.remove(open_alias)
            except ApiError as error:
                choices.show_refusal(error)
            else:
                choices.rerun_with_notice(f"{fmt.code(open_alias)} is gone.")
    if can_write:
        _move_alias(aliases, adapter)


def _move_alias(aliases: Collection, adapter: Adapter) -> None:
    ready = {
        version["id"]: f"version {version['version']}"
        for version in adapter["versions"]
        if version["status"] == "ready"
    }
    with st.expander(
        "Set or move an alias", icon=":material/label:", key=choices.fresh("alias_box")
    ):
        moved = forms.create(
            "alias",
            (
                Field("alias", "Alias", max_chars=64, placeholder="production"),
                Field("version_id", "Names", "choice", options=tuple(ready), labels=ready),
            ),
            submit="Set it",
            check=lambda body: None if body["alias"] else "Write the alias's name.",
            send=lambda body, _once: aliases.put(body["alias"], {"version_id": body["version_id"]}),
        )
    if moved is not None:
        followed = ", ".join(fmt.code(name) for name in moved["moved"])
        choices.rerun_with_notice(
            f"{fmt.code(moved['alias'])} names version {moved['version']}."
            + (f" With it went: {followed}." if followed else "")
        )


def _uses(
    versions: Collection, adapter: Adapter, version: AdapterVersion, *, can_write: bool
) -> None:
    """What names it; nothing: it can be retired. Asked when the reader wants it: each version is a call."""
    id_ = version["id"]
    if not st.toggle("What names it?", key=f"uses_{id_}"):
        return
    uses = versions.part(id_, "uses")["uses"]
    if uses:
        said = ", ".join(f"{one['kind'].replace('_', ' ')} {fmt.code(one['name'])}" for one in uses)
        st.markdown(f"Named by: {said}")
    else:
        st.caption("Nothing names it.")
    if not can_write:
        return
    try:
        if version["status"] == "retired":
            if st.button("Let it be used again", key=f"unretire_{id_}"):
                versions.act(id_, "unretire")
                choices.rerun_with_notice("It can be deployed again.")
        elif uses:
            st.caption("It can be retired once nothing names it.")
        elif confirm.by_name(
            "Retire it",
            name=f"{adapter['name']} v{version['version']}",
            consequence="Nothing can use it any more, and engines let it go. Its files stay.",
            button="Retire it",
            key=f"retire_{id_}",
        ):
            versions.act(id_, "retire")
            choices.rerun_with_notice(
                "It is retired: nothing can use it, and engines let it go. Its files stay."
            )
    except ApiError as error:
        choices.show_refusal(error)


def report(version: AdapterVersion, *, key: str) -> None:
    """What was checked and seen at its upload."""
    found = version["report"]
    probe = found["probe"]
    figures = st.columns(4)
    figures[0].metric("Modules", f"{found['matched_modules']} / {found['total_modules']}")
    figures[1].metric("Parameters", fmt.count(found["parameters"]))
    figures[2].metric("Largest norm", f"{found['norms']['max']:.3g}")
    changed = "not asked" if probe is None else f"{probe['changed']} / {len(probe['samples'])}"
    figures[3].metric("Answers changed", changed)
    sentences(
        [
            {
                "check": check["name"],
                "result": "ok" if check["ok"] else "look here",
                "detail": check["detail"],
            }
            for check in found["checks"]
        ]
    )
    if probe is None:
        return
    st.markdown("**Base and adapter, side by side**")
    st.caption(f"Largest change of a log probability: {probe['max_logprob_difference']:.3g}")
    for sample in probe["samples"]:
        st.text(f"› {sample['prompt']}")
        answers = (("base", sample["base"]), ("adapter", sample["adapter"]))
        for column, (who, text) in zip(st.columns(2), answers, strict=True):
            with column.container(border=True):
                st.caption(who)
                st.text(text or "(nothing)")
