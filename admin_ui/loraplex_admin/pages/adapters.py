"""Upload an adapter, read its report, choose what each deployment answers with."""

from __future__ import annotations

from typing import cast

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import (
    Adapter,
    AdapterVersion,
    Api,
    ApiError,
    Deployment,
    Page,
    Tenant,
)
from loraplex_admin.components.listing import Columns, Listing

_BASE = "base (no adapter)"


def render(api: Api, access: Access) -> None:
    """Deployments first: they are what tenants see; then adapters and the upload."""
    st.title("Adapters")
    choices.show_notice()
    tenant = choices.tenant(api, access, key="adapters_tenant", action="adapter.read")
    if tenant is None:
        return
    can_write = access.may("adapter.write", tenant["id"])
    if can_write:
        _upload(api, tenant)
    st.subheader("Adapters and versions")
    open_id = Listing(
        "adapters",
        fetch=lambda **query: api.adapters(tenant["id"], **query),
        columns=Columns(
            lambda one: _adapter_cells(one, tenant["billing_tz"]),
            numbers=("versions", "rank"),
            wide=("name",),
        ),
        search_label="Search adapters",
        empty="This tenant has no adapter yet. "
        + ("Upload the first one above." if can_write else "Its developers upload adapters."),
    ).show()
    if open_id is not None:
        try:
            adapter = api.of_tenant(tenant["id"], "adapters").get(open_id)
        except ApiError as error:
            choices.show_refusal(error)
        else:
            _adapter(cast(Adapter, adapter), tenant["billing_tz"])
    _deployments(api, tenant, api.adapters(tenant["id"]), can_write=can_write)


def _upload(api: Api, tenant: Tenant) -> None:
    uploaded = st.session_state.get("uploaded")
    if uploaded is not None and uploaded["tenant_id"] == tenant["id"]:
        with st.container(border=True):
            st.success(
                f"{fmt.code(uploaded['name'])} version {uploaded['version']['version']} is ready to "
                "serve. Deploy it below to let it answer.",
                icon=":material/check_circle:",
            )
            _report(uploaded["version"], key="uploaded")
            if st.button("Close the report", key="uploaded_close"):
                del st.session_state["uploaded"]
                st.rerun()
    with (
        st.expander("Upload an adapter", icon=":material/upload:", key="upload"),
        # A form: nothing runs, and so nothing is drawn anew, while files are still on their way.
        st.form("upload_form", border=False),
    ):
        name = st.text_input(
            "Adapter name", key=choices.fresh("upload_name"), max_chars=80, placeholder="capitals"
        )
        left, right = st.columns(2)
        config = left.file_uploader(
            "adapter_config.json", type=["json"], key=choices.fresh("upload_config")
        )
        tensors = right.file_uploader(
            "adapter_model.safetensors", type=["safetensors"], key=choices.fresh("upload_model")
        )
        st.caption(
            "A PEFT LoRA folder's two files. The same name again makes its next version. "
            "Large files are quicker with `loraplex adapters upload`."
        )
        if not st.form_submit_button("Upload and check", type="primary", key="upload_go"):
            return
        if not name.strip() or config is None or tensors is None:
            given = {
                "a name": name.strip(),
                "`adapter_config.json`": config,
                "`adapter_model.safetensors`": tensors,
            }
            missing = ", ".join(what for what, value in given.items() if not value)
            st.error(f"Still missing: {missing}.", icon=":material/error:")
            return
        with st.spinner("Checking the files, then asking the engine a few questions …"):
            try:
                answer = api.upload_adapter(tenant["id"], name.strip(), config, tensors)
            except ApiError as error:
                choices.show_refusal(error)
                return
    st.session_state["uploaded"] = answer
    # An uploaded file sits in this process's memory until its widget is gone.
    choices.empty("upload_name", "upload_config", "upload_model")
    st.rerun()


def _deployments(api: Api, tenant: Tenant, adapters: Page[Adapter], *, can_write: bool) -> None:
    st.subheader("Deployments")
    page = api.deployments(tenant["id"])
    Listing(
        "deployments",
        fetch=lambda after=None: api.deployments(tenant["id"], after=after),
        columns=Columns(_deployment_row, wide=("model id", "answers with")),
        empty="No deployment yet: this tenant reaches only the base model.",
        is_main=False,
        can_open=False,
    ).show()
    if can_write:
        _deploy(api, tenant, page, adapters)
        if page["data"]:
            _take_out(api, tenant, page)


def _deploy(
    api: Api, tenant: Tenant, deployments: Page[Deployment], adapters: Page[Adapter]
) -> None:
    versions = {
        version["id"]: f"{adapter['name']} v{version['version']}"
        for adapter in adapters["data"]
        for version in adapter["versions"]
        if version["status"] == "ready"
    }
    with (
        st.expander("Deploy", icon=":material/rocket_launch:", key="deploy_box"),
        st.form("deploy", border=False),
    ):
        name = st.selectbox(
            "Model id",
            [deployment["name"] for deployment in deployments["data"]],
            index=None,
            accept_new_options=True,
            placeholder="Write a new one, or choose one to change",
            help="What the tenant's clients write as `model`.",
            key=f"deploy_name_{tenant['id']}",
        )
        version_id = st.selectbox(
            "Answers with",
            [*versions, ""],
            format_func=lambda id_: versions.get(id_, _BASE),
            help="Of the adapters on this page." if adapters["has_more"] else None,
            key=f"deploy_version_{tenant['id']}",
        )
        if not st.form_submit_button("Deploy", type="primary", key="deploy_go"):
            return
        if name is None or not name.strip():
            st.error("Write a model id, or choose one.", icon=":material/error:")
            return
        try:
            made = api.deploy(tenant["id"], name.strip(), version_id or None)
        except ApiError as error:
            choices.show_refusal(error)
            return
    revision = made["revision"]
    choices.rerun_with_notice(
        f"{fmt.code(made['name'])} answers with "
        f"{fmt.code(revision['adapter_name'] or made['base_model'])} from now on "
        f"(revision {revision['number']})."
    )


def _take_out(api: Api, tenant: Tenant, deployments: Page[Deployment]) -> None:
    with st.expander("Take a model id out of service", icon=":material/block:", key="take_out"):
        name = st.selectbox(
            "Model id",
            [deployment["name"] for deployment in deployments["data"]],
            index=None,
            placeholder="Choose one",
            key=f"take_out_name_{tenant['id']}",
        )
        if name is None:
            return
        st.warning(f"Requests for {fmt.code(name)} are refused from then on.")
        if not st.button("Take it out", type="primary", key="take_out_go"):
            return
        try:
            api.delete_deployment(tenant["id"], name)
        except ApiError as error:
            choices.show_refusal(error)
            return
    st.session_state.pop(f"take_out_name_{tenant['id']}", None)
    choices.rerun_with_notice(f"{fmt.code(name)} is out of service.")


def _deployment_row(deployment: Deployment) -> dict[str, object]:
    revision = deployment["revision"]
    return {
        "model id": deployment["name"],
        "answers with": revision["adapter_name"] or _BASE,
        "digest": fmt.digest(revision["digest"]),
        "revision": revision["number"],
        "since": fmt.time(revision["created_at"]),
    }


def _adapter_cells(adapter: Adapter, zone: str) -> dict[str, object]:
    newest = adapter["versions"][0] if adapter["versions"] else None
    return {
        "name": fmt.cell(adapter["name"]),
        "versions": str(len(adapter["versions"])),
        "newest": "–" if newest is None else f"v{newest['version']}, {newest['status']}",
        "rank": "–" if newest is None else str(newest["rank"]),
        "digest": "–" if newest is None else fmt.digest(newest["digest"]),
        "since": fmt.time(adapter["created_at"], zone),
    }


def _adapter(adapter: Adapter, zone: str) -> None:
    with st.container(border=True):
        st.subheader(fmt.literal(adapter["name"]))
        for number, version in enumerate(adapter["versions"]):
            with st.expander(
                f"Version {version['version']} · {fmt.literal(version['status'])}",
                icon=":material/layers:",
                expanded=number == 0,
            ):
                st.caption(
                    f"{fmt.code(version['digest'])}  \nrank {version['rank']} · "
                    f"{fmt.size(version['size_bytes'])} · "
                    f"{', '.join(fmt.code(module) for module in version['target_modules'])} · "
                    f"{fmt.time(version['created_at'], zone)}"
                )
                _report(version, key=version["id"])


def _report(version: AdapterVersion, *, key: str) -> None:
    report = version["report"]
    probe = report["probe"]
    figures = st.columns(4)
    figures[0].metric("Modules", f"{report['matched_modules']} / {report['total_modules']}")
    figures[1].metric("Parameters", fmt.count(report["parameters"]))
    figures[2].metric("Largest norm", f"{report['norms']['max']:.3g}")
    changed = "not asked" if probe is None else f"{probe['changed']} / {len(probe['samples'])}"
    figures[3].metric("Answers changed", changed)
    st.dataframe(
        [
            {
                "check": check["name"],
                "result": "ok" if check["ok"] else "look here",
                "detail": check["detail"],
            }
            for check in report["checks"]
        ],
        hide_index=True,
        column_config={"detail": st.column_config.TextColumn(width="large")},
        key=f"checks_{key}",
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
