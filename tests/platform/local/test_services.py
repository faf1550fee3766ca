"""What reaches the services of a local fleet from `loraplex up` and the shell that runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from loraplex_platform.local.credentials import load_or_make
from loraplex_platform.local.data_dir import DataDir
from loraplex_platform.local.services import Fleet, FleetOptions


@pytest.mark.parametrize("tool_format", [None, "llama"])
def test_a_tool_format_reaches_the_gateway_by_option_only(
    tool_format: str | None, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_TOOL_FORMAT", "mistral")
    data_dir = DataDir.create(short_tmp_path / "data")
    options = FleetOptions(
        host="127.0.0.1",
        gateway_port=8000,
        control_port=8001,
        console_port=None,
        model_dir=Path("/models/m"),
        base_model="m",
        database_url="postgresql://x@/y",
        redis_url="redis://r",
    )
    options = replace(options, tool_format=tool_format)

    fleet = Fleet(options, data_dir, load_or_make(data_dir.secrets_file))

    told = {service.name: service.env().get("LORAPLEX_TOOL_FORMAT") for service in fleet.services()}
    assert told.pop("gateway") == tool_format
    assert set(told.values()) == {None}
