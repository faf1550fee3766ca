"""What the client of the control API sends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx
import pytest
from loraplex_platform.admin_client import AdminClient


@pytest.mark.parametrize("is_probed", [True, False])
def test_an_upload_names_the_probe_only_to_leave_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_probed: bool
) -> None:
    """A control API from before the field refuses it, and probes as is wanted."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.read().decode())
        return httpx.Response(201, json={})

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))

    with AdminClient("http://control.test", "key") as admin:
        admin.upload_adapter("ten_1", "a", tmp_path, is_probed=is_probed)

    (body,) = sent
    assert 'name="name"' in body
    assert ('name="probe"\r\n\r\nfalse\r\n' in body) == (not is_probed)
    assert ("probe" in body) == (not is_probed)
