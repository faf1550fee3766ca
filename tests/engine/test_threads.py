"""Thread counts follow the cgroup's quota."""

from __future__ import annotations

from pathlib import Path

import pytest
from loraplex_engine.threads import cpu_quota, usable_cpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200000 100000", 2.0),
        ("150000 100000\n", 1.5),
        ("max 100000", None),
        ("", None),
        ("x 0", None),
    ],
)
def test_quota_of_cgroup_two(tmp_path: Path, text: str, expected: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text)

    assert cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("400000", 4.0), ("-1", None)])
def test_quota_of_cgroup_one(tmp_path: Path, quota: str, expected: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")

    assert cpu_quota(tmp_path) == expected


def test_no_cgroup_means_the_affinity(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert usable_cpus(tmp_path) >= 1


def test_a_quota_below_one_still_gives_a_thread(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("10000 100000")

    assert usable_cpus(tmp_path) == 1
