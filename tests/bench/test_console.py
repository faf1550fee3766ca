"""The console's bench: its tables are such as the API can show, and nothing that it lists is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.console_tables import Sizes

TIMEOUT_S = 400


def test_a_scale_keeps_enough_of_each_for_a_page_to_be_one() -> None:
    assert Sizes().scaled(1.0) == Sizes()
    assert Sizes().scaled(0.05).keys == 20_000
    assert Sizes().scaled(1e-9).residents == 20


@pytest.mark.slow
def test_every_list_and_report_is_timed_at_a_small_scale(short_tmp_path: Path) -> None:
    report = short_tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "bench.console",
        "--scale",
        "0.001",
        "--only",
        "lists",
        "usage",
    ]
    ended = subprocess.run(
        [*command, "--keep", str(short_tmp_path / "kept"), "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

    timings = {one["title"]: one for one in json.loads(report.read_text())["timings"]}
    for title in ("keys", "adapters", "deployments", "rollouts", "eval results", "deliveries"):
        assert timings[title]["rows"] > 0, title
    for title, timing in timings.items():
        assert ("none" in title) <= (timing["rows"] == 0), title
        assert 0 < timing["median_ms"] <= timing["p95_ms"] <= timing["longest_ms"]
    assert timings["large tenant, by day and key"]["rows"] > 0
