"""Resumable uploads on the wire."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel as Schema
from pydantic import Field, StringConstraints

from loraplex_platform.control.schemas import Body, Resource, UnixSeconds
from loraplex_platform.db import AdapterUpload
from loraplex_platform.ids import format_id
from loraplex_platform.registry.upload import NAME_PATTERN
from loraplex_platform.registry.upload_files import UploadFolders
from loraplex_platform.registry.upload_sessions import NewFile, UploadPlan

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
AdapterName = Annotated[
    str,
    StringConstraints(pattern=f"^{NAME_PATTERN.pattern}$"),
    Field(description="The adapter's name; an existing one gets a version.", examples=["capitals"]),
]


class NewUploadFile(Body):
    """A file that is to come."""

    name: str = Field(
        max_length=200,
        description="adapter_config.json or adapter_model.safetensors.",
        examples=["adapter_config.json"],
    )
    size_bytes: int = Field(ge=1, le=1 << 40)
    sha256: Sha256 | None = Field(default=None, description="If given, what arrives must have it.")


class NewUpload(Body):
    """What is to come, before a byte of it does."""

    name: AdapterName
    files: list[NewUploadFile] = Field(min_length=1, max_length=10)
    probe: bool = Field(
        default=True,
        description="false: it is checked, but asked no questions beside the base.",
    )
    tokenizer_sha256: Sha256 | None = None
    chat_template_sha256: Sha256 | None = None

    def plan(self) -> UploadPlan:
        """As the service takes it."""
        return UploadPlan(
            name=self.name,
            files=tuple(NewFile(file.name, file.size_bytes, file.sha256) for file in self.files),
            is_probed=self.probe,
            tokenizer_sha256=self.tokenizer_sha256,
            chat_template_sha256=self.chat_template_sha256,
        )


class UploadFileResource(Schema):
    """A file of it, and how much is here."""

    name: str
    size_bytes: int
    sha256: str | None
    offset: int = Field(description="Bytes that are here: where to go on.")


class RefusalResource(Schema):
    """Why it is no version, as the call was answered."""

    message: str
    param: str | None
    code: str | None


class UploadResource(Resource):
    """A resumable upload."""

    object: Literal["adapter_upload"] = "adapter_upload"
    id: str
    tenant_id: str
    name: str
    state: Literal["open", "completed", "refused"]
    probe: bool
    files: list[UploadFileResource]
    version_id: str | None
    error: RefusalResource | None
    created_at: UnixSeconds
    expires_at: UnixSeconds = Field(description="Deleted then, unless somebody works on it.")


def show_session(upload: AdapterUpload, folders: UploadFolders) -> UploadResource:
    """The upload as the API shows it."""

    def show_file(name: str, facts: dict[str, Any]) -> UploadFileResource:
        is_open = upload.state == "open"
        # Of one that has ended the bytes are gone; of a completed one all had come.
        offset = folders.offset(upload.id, name) if is_open else int(facts["size_bytes"])
        return UploadFileResource(name=name, offset=offset, **facts)

    version_id = upload.version_id
    return UploadResource.model_validate(
        {
            "id": format_id("adapter_upload", upload.id),
            "tenant_id": format_id("tenant", upload.tenant_id),
            "name": upload.name,
            "state": upload.state,
            "probe": upload.is_probed,
            "files": [show_file(name, facts) for name, facts in upload.files.items()],
            "version_id": None if version_id is None else format_id("adapter_version", version_id),
            "error": upload.error,
            "created_at": upload.created_at,
            "expires_at": upload.expires_at,
        }
    )
