"""Upload an adapter, read its reports, name its versions by aliases, and retire them."""

from __future__ import annotations

from typing import cast

import streamlit as st

from loraplex_admin import choices
from loraplex_admin import format as fmt
from loraplex_admin.access import Access
from loraplex_admin.api import Adapter, Api, ApiError, Tenant
from loraplex_admin.components import forms
from loraplex_admin.components.forms import Field
from loraplex_admin.components.listing import Columns, Listing
from loraplex_admin.components.live import live
from loraplex_admin.resources import Row
from loraplex_admin.views import adapter_versions


def render(api: Api, access: Access) -> None:
    """The upload, the list, then the adapter that is open with its versions and aliases."""
    st.title("Adapters")
    choices.show_notice()
    tenant = choices.tenant(api, access, key="adapters_tenant", action="adapter.read")
    if tenant is None:
        return
    can_write = access.may("adapter.write", tenant["id"])
    if can_write:
        _upload(api, tenant)
        _import(api, tenant)
    st.subheader("Adapters and versions")
    listing = Listing(
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
    )
    open_id = listing.show()
    if open_id is not None:
        try:
            adapter = api.of_tenant(tenant["id"], "adapters").get(open_id)
        except ApiError as error:
            listing.refuse(error)
        else:
            adapter_versions.show(api, tenant, cast(Adapter, adapter), can_write=can_write)


def _upload(api: Api, tenant: Tenant) -> None:
    uploaded = st.session_state.get("uploaded")
    if uploaded is not None and uploaded["tenant_id"] == tenant["id"]:
        with st.container(border=True):
            st.success(
                f"{fmt.code(uploaded['name'])} version {uploaded['version']['version']} is ready to "
                "serve. Deploy it under *Deployments* to let it answer.",
                icon=":material/check_circle:",
            )
            adapter_versions.report(uploaded["version"], key="uploaded")
            if st.button("Close the report", key="uploaded_close"):
                del st.session_state["uploaded"]
                st.rerun()
    with (
        st.expander("Upload an adapter", icon=":material/upload:", key=choices.fresh("upload")),
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
    choices.empty("upload", "upload_name", "upload_config", "upload_model")
    st.rerun()


def _adapter_cells(adapter: Adapter, zone: str) -> dict[str, object]:
    newest = adapter["versions"][0] if adapter["versions"] else None
    return {
        "name": fmt.cell(adapter["name"]),
        "versions": str(len(adapter["versions"])),
        "newest": "–" if newest is None else f"v{newest['version']}, {newest['status']}",
        "rank": "–" if newest is None else str(newest["rank"]),
        "digest": "–" if newest is None else fmt.digest(newest["digest"]),
        "since": fmt.moment(adapter["created_at"], zone),
    }


def _import(api: Api, tenant: Tenant) -> None:
    """From where the server reaches: its bytes never pass the browser."""
    imports = api.of_tenant(tenant["id"], "adapter-imports")
    zone = tenant["billing_tz"]
    with st.expander(
        "Import an adapter", icon=":material/cloud_download:", key=choices.fresh("import_box")
    ):
        made = forms.create(
            "import",
            (
                Field("name", "Adapter name", max_chars=80, placeholder="capitals"),
                Field(
                    "source",
                    "From",
                    max_chars=1000,
                    placeholder="hf:owner/name@revision, s3://bucket/folder or file:folder",
                    help="What the operator allows (LORAPLEX_IMPORT_SOURCES).",
                ),
            ),
            submit="Import it",
            send=lambda body, once: api.send(
                "POST", f"/tenants/{tenant['id']}/adapters/import", body, once=once
            ),
        )
        if made is not None:
            choices.rerun_with_notice(
                f"{fmt.code(made['name'])} is being fetched: see its state below."
            )
        page = imports.page()
        is_under_way = any(one["state"] in ("queued", "running") for one in page["data"])

        def draw() -> None:
            Listing(
                "imports",
                fetch=lambda after=None: imports.page(after=after),
                columns=Columns(
                    lambda one: {
                        "name": fmt.cell(one["name"]),
                        "from": fmt.cell(one["source"]),
                        "state": one["state"],
                        "came": _progress(one),
                        "trouble": fmt.cell(one["error"] and one["error"]["message"]) or "–",
                        "began": fmt.moment(one["created_at"], zone),
                    },
                    wide=("from", "trouble"),
                ),
                empty="Nothing was imported yet.",
                is_main=False,
                can_open=False,
            ).show()

        if is_under_way:
            live(draw, calls=1)
        elif page["data"]:
            draw()


def _progress(one: Row) -> str:
    if one["total_bytes"] is None:
        return fmt.size(one["received_bytes"])
    return f"{fmt.size(one['received_bytes'])} of {fmt.size(one['total_bytes'])}"
