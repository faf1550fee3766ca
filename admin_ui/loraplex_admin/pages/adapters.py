"""Upload an adapter, read its report, choose what each deployment answers with."""

from __future__ import annotations

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.api import Adapter, AdapterVersion, Api, ApiError, Deployment, Tenant, User

_BASE = "base (no adapter)"


def render(api: Api, user: User) -> None:
    """Deployments first: they are what tenants see; then adapters and the upload."""
    st.title("Adapters")
    tenant = choices.tenant(api, key="adapters_tenant")
    if tenant is None:
        return
    can_write = user["role"] == "admin"
    if can_write:
        _upload(api, tenant)
    cursors = f"adapters_cursors_{tenant['id']}"
    page = api.adapters(tenant["id"], after=choices.cursor(cursors))
    _deployments(api, tenant, page["data"], can_write=can_write)
    st.subheader("Adapters and versions")
    if not page["data"]:
        st.info("This tenant has no adapter yet.")
    for adapter in page["data"]:
        _adapter(adapter)
    choices.pager(cursors, page["last_id"], has_more=page["has_more"])


def _upload(api: Api, tenant: Tenant) -> None:
    uploaded = st.session_state.pop("uploaded", None)
    if uploaded is not None:
        st.success(
            f"{uploaded['name']} version {uploaded['version']['version']} is ready to serve. "
            "Deploy it below to let it answer.",
            icon=":material/check_circle:",
        )
        _report(uploaded["version"], key="uploaded")
    with st.expander("Upload an adapter", icon=":material/upload:", expanded=uploaded is None):
        name = st.text_input("Adapter name", key="upload_name")
        config = st.file_uploader("adapter_config.json", type=["json"], key="upload_config")
        tensors = st.file_uploader(
            "adapter_model.safetensors", type=["safetensors"], key="upload_model"
        )
        st.caption("PEFT LoRA format. Large files are quicker with `loraplex adapters upload`.")
        is_complete = bool(name.strip()) and config is not None and tensors is not None
        is_asked = st.button(
            "Upload and check", type="primary", key="upload_go", disabled=not is_complete
        )
        if is_asked and config is not None and tensors is not None:
            with st.spinner("Checking the files, then asking the engine a few questions …"):
                try:
                    answer = api.upload_adapter(tenant["id"], name.strip(), config, tensors)
                except ApiError as error:
                    choices.show_refusal(error)
                    return
            st.session_state["uploaded"] = answer
            st.rerun()


def _deployments(api: Api, tenant: Tenant, adapters: list[Adapter], *, can_write: bool) -> None:
    st.subheader("Deployments")
    cursors = f"deployments_cursors_{tenant['id']}"
    page = api.deployments(tenant["id"], after=choices.cursor(cursors))
    if page["data"]:
        st.dataframe(
            [_deployment_row(deployment) for deployment in page["data"]],
            hide_index=True,
            key="deployments_table",
        )
        choices.pager(cursors, page["last_id"], has_more=page["has_more"])
    else:
        st.info("No deployment yet: tenants reach only the base model.")
    if not can_write:
        return
    versions: dict[str, str | None] = {_BASE: None}
    for adapter in adapters:
        for version in adapter["versions"]:
            label = f"{adapter['name']} v{version['version']} ({fmt.digest(version['digest'])})"
            versions[label] = version["id"]
    with st.form("deploy"):
        name = st.text_input(
            "Model id", key="deploy_name", help="What the tenant writes as `model`."
        )
        label = st.selectbox("Answers with", list(versions), key="deploy_version")
        if st.form_submit_button("Deploy", type="primary"):
            try:
                made = api.deploy(tenant["id"], name.strip(), versions[label])
            except ApiError as error:
                choices.show_refusal(error)
                return
            st.toast(f"{made['name']} is at revision {made['revision']['number']}.")
            st.rerun()


def _deployment_row(deployment: Deployment) -> dict[str, object]:
    revision = deployment["revision"]
    return {
        "model id": deployment["name"],
        "answers with": revision["adapter_name"] or _BASE,
        "digest": fmt.digest(revision["digest"]),
        "revision": revision["number"],
        "since": fmt.time(revision["created_at"]),
    }


def _adapter(adapter: Adapter) -> None:
    newest = adapter["versions"][0]
    with st.expander(f"{adapter['name']} · version {newest['version']}", icon=":material/layers:"):
        for version in adapter["versions"]:
            st.markdown(f"**Version {version['version']}** · {version['status']}")
            st.caption(
                f"`{version['digest']}` · rank {version['rank']} · "
                f"{fmt.size(version['size_bytes'])} · {fmt.time(version['created_at'])}"
            )
            _report(version, key=version["id"])


def _report(version: AdapterVersion, *, key: str) -> None:
    report = version["report"]
    figures = st.columns(4)
    figures[0].metric("Modules", f"{report['matched_modules']} / {report['total_modules']}")
    figures[1].metric("Parameters", fmt.count(report["parameters"]))
    figures[2].metric("Largest norm", f"{report['norms']['max']:.3g}")
    figures[3].metric(
        "Answers changed", f"{report['probe']['changed']} / {len(report['probe']['samples'])}"
    )
    st.dataframe(
        [
            {"check": c["name"], "result": "ok" if c["ok"] else "failed", "detail": c["detail"]}
            for c in report["checks"]
        ],
        hide_index=True,
        key=f"checks_{key}",
    )
    st.markdown("**Base and adapter, side by side**")
    for sample in report["probe"]["samples"]:
        st.caption(sample["prompt"])
        left, right = st.columns(2)
        with left.container(border=True):
            st.caption("base")
            st.text(sample["base"] or "(nothing)")
        with right.container(border=True):
            st.caption("adapter")
            st.text(sample["adapter"] or "(nothing)")
