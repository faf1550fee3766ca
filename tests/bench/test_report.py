"""Tables and chart from a results file: medians, ratios, and rows for what failed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from bench import report
from bench.report import Results

_SVG = "{http://www.w3.org/2000/svg}"


def _run(contender: str, number: int, speed: float, **more: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "workload": "mixed",
        "contender": contender,
        "round": number,
        "requests": 4,
        "errors": 0,
        "faults": 0,
        "is_cut": False,
        "output_tokens": 200,
        "output_tokens_per_s": speed,
        "prompt_tokens_per_s": 2 * speed,
        "ttft_p50_s": 0.5,
        "ttft_p95_s": 0.75,
        "inter_token_p50_s": 0.02,
        "inter_token_p95_s": None,
        "peak_memory_gib": 1.5,
        "peak_process_gib": 1.25,
        "startup_s": 3.0,
    }
    return figures | more


@pytest.fixture
def content() -> dict[str, Any]:
    names = {
        "loraplex": "Loraplex",
        "slow": "Slow & Co.",
        "absent": "Absent",
        "cut": "Cut",
    }
    return {
        "rounds": 3,
        "dtype": "float32",
        "num_threads": 2,
        "limit_s": 60.0,
        "is_quick": False,
        "machine": {"read_gb_s": 20.0, "gemm_gflop_s": 150.0},
        "workloads": {
            "mixed": {
                "title": "four requests",
                "counts": "output",
                "output_tokens": 400,
                "prompt_tokens": 100,
                "floor_s": 2.0,
            }
        },
        "contenders": {
            name: {"title": title, "cannot": [], "weights": ""} for name, title in names.items()
        },
        "runs": [
            *(_run("loraplex", n, speed) for n, speed in enumerate((100.0, 120.0, 90.0))),
            *(_run("slow", n, speed) for n, speed in enumerate((50.0, 30.0, 45.0))),
            {"workload": "mixed", "contender": "absent", "round": 0, "failed": "needs AVX512"},
            _run("cut", 0, 10.0, errors=3, is_cut=True),
        ],
        "scale": [],
    }


def _printed(content: dict[str, Any]) -> str:
    out = io.StringIO()
    report.print_report(content, Console(file=out, width=200))
    return out.getvalue()


def test_a_ratio_is_taken_within_rounds_and_the_speed_is_a_median(content: dict[str, Any]) -> None:
    results = Results(content)

    # 100/50, 120/30, 90/45: not the ratio of the medians, 100/45.
    assert results.ratio("mixed", "slow") == 2.0
    assert results.ratio("mixed", "cut") == 10.0
    assert results.ratio("mixed", "absent") is None
    assert results.roofline_share("mixed", "loraplex") == 100.0 / (400 / 2.0)


def test_a_round_in_which_requests_failed_gives_no_speed(content: dict[str, Any]) -> None:
    # 3 of 4 refused: the one that is left has the machine for itself.
    content["runs"].append(_run("slow", 0, 900.0, errors=3, faults=3, ttft_p50_s=0.01))
    content["runs"] += [_run("hasty", 0, 500.0, errors=3, faults=1, is_cut=True)]
    content["contenders"]["hasty"] = {"title": "Hasty", "cannot": [], "weights": ""}
    content["runs"].remove(next(r for r in content["runs"] if r["contender"] == "slow"))
    results = Results(content)

    assert results.ratio("mixed", "slow") == (120 / 30 + 90 / 45) / 2
    assert results.median("mixed", "slow", "ttft_p50_s") == 0.5
    assert results.ratio("mixed", "hasty") is results.roofline_share("mixed", "hasty") is None
    (group,) = report.chart_groups(results)
    bars = {bar.label: bar for bar in group.bars}
    assert (bars["Hasty"].value, bars["Hasty"].note) == (None, "3 of 4 failed")
    assert bars["Slow & Co."].note == "ours: 3.0x 3 of 4 failed"
    row = next(line for line in _printed(content).splitlines() if " Hasty " in line)
    assert "3 of 4 failed" in row.rstrip(" │").rsplit("│", 1)[1]
    assert "500" not in row


def test_ours_cut_off_marks_every_ratio(content: dict[str, Any]) -> None:
    content["runs"][0] |= {"is_cut": True, "errors": 1}
    (group,) = report.chart_groups(Results(content))

    assert [bar.note for bar in group.bars if bar.value] == [
        "† cut off, at least",
        "ours: 2.0x†",
        "ours: 10.0x† † cut off, at least",
    ]


def test_the_floor_is_that_of_one_type_of_weights(content: dict[str, Any]) -> None:
    content["contenders"]["slow"]["weights"] = "Q4_1"
    del content["contenders"]["cut"]["weights"]  # a file of before
    results = Results(content)

    shares = [results.roofline_share("mixed", name) for name in ("loraplex", "slow", "cut")]
    assert shares == [0.5, None, None]
    printed = _printed(content)
    assert "of weights in float32" in printed
    assert any("Slow & Co." in line and "Q4_1" in line for line in printed.splitlines())


def test_no_chart_where_ours_failed(content: dict[str, Any], tmp_path: Path) -> None:
    content["runs"][1] |= {"errors": 1, "faults": 1}
    out, path = io.StringIO(), tmp_path / "chart.svg"

    assert not report.write_chart(content, path, Console(file=out, width=200))
    assert not path.exists()
    assert "requests to ours failed (mixed, loraplex)" in out.getvalue()


def test_the_workload_says_which_tokens_count(content: dict[str, Any]) -> None:
    content["workloads"]["mixed"]["counts"] = "prompt"

    assert list(Results(content).speeds("mixed", "slow").values()) == [100.0, 60.0, 90.0]


def test_the_table_has_a_row_for_each_also_for_what_failed(content: dict[str, Any]) -> None:
    lines = _printed(content).splitlines()
    rows = {
        name: next(line for line in lines if f" {name} " in line)
        for name in ("Loraplex", "Slow & Co.", "Absent", "Cut")
    }

    assert "100.0" in rows["Loraplex"]
    assert "90.0-120.0" in rows["Loraplex"]
    assert "none" in rows["Loraplex"]
    assert "45.0" in rows["Slow & Co."]
    assert "2.00x" in rows["Slow & Co."]
    assert "0.50 / 0.75" in rows["Slow & Co."]
    assert "20 / -" in rows["Slow & Co."]
    assert "needs AVX512" in rows["Absent"]
    assert "≥10.0†" in rows["Cut"]
    assert all("float32" in row for row in rows.values())
    assert "10.00x†" in rows["Cut"]
    assert "3 of 4" in rows["Cut"]
    assert any("cut off after 60 s" in line for line in lines)


def test_what_a_peer_cannot_do_and_that_quick_counts_for_nothing_is_said(
    content: dict[str, Any],
) -> None:
    content["contenders"]["slow"]["cannot"] = ["has no legs"]
    content["is_quick"] = True
    printed = _printed(content)

    assert "Slow & Co.: has no legs" in printed
    assert "count for nothing" in printed


def test_the_scale_table_has_a_column_per_level_and_a_row_per_number_of_adapters(
    content: dict[str, Any],
) -> None:
    memory = {"peak_memory_gib": 1.0, "peak_process_gib": 0.5, "startup_s": 2.0, "errors": 0}
    content["scale"] = [
        {
            "adapters": used,
            "registered": known,
            "concurrency": level,
            "output_tokens_per_s": speed,
            **memory,
        }
        for used, known, level, speed in (
            (1, 8, 1, 11.0),
            (1, 8, 4, 22.0),
            (8, 8, 1, 33.0),
            (8, 2000, 4, 44.0),
        )
    ]
    printed = _printed(content)

    row = next(line for line in printed.splitlines() if "1 (8)" in line)
    assert "11.0" in row
    assert "22.0" in row
    assert any("8 (2000)" in line and "44.0" in line for line in printed.splitlines())


def test_the_chart_is_svg_for_light_and_dark_with_bars_in_proportion(
    content: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "chart.svg"
    assert report.write_chart(content, path, Console(file=io.StringIO()))
    root = ElementTree.fromstring(path.read_text())

    bars = root.findall(f"{_SVG}rect")
    widths = [float(bar.get("width", "0")) for bar in bars]
    assert [bar.get("class") for bar in bars] == ["ours", "peer", "peer"]
    assert widths[1] / widths[0] == pytest.approx(0.45, abs=0.01)
    assert widths[2] / widths[0] == pytest.approx(0.10, abs=0.01)
    texts = " ".join("".join(text.itertext()) for text in root.findall(f"{_SVG}text"))
    assert "Slow & Co." in texts
    assert "needs AVX512" in texts
    assert "† cut off" in texts
    style = root.find(f"{_SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")
    right = max(float(bar.get("x", "0")) + width for bar, width in zip(bars, widths, strict=True))
    assert right < float(root.get("width", "0"))


def test_a_results_file_prints_again(
    content: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, picture = tmp_path / "r.json", tmp_path / "c.svg"
    file.write_text(json.dumps(content))
    monkeypatch.setattr("sys.argv", ["report", str(file), "--chart", str(picture)])

    report.main()

    assert "Slow & Co." in capsys.readouterr().out
    assert picture.read_text().startswith("<svg")


def test_what_adapters_cost_is_told_of_whom_it_is_known(content: dict[str, Any]) -> None:
    facts = content["workloads"]["mixed"]
    content["workloads"]["base"] = facts
    content["runs"] += [
        _run("loraplex", 0, 150.0, workload="base"),
        _run("loraplex", 1, 150.0, workload="base"),
        _run("loraplex", 2, 150.0, workload="base", errors=1, faults=1),
        {"workload": "base", "contender": "slow", "round": 0, "failed": "no"},
    ]
    results = Results(content)

    # 150 / 100 and 150 / 120; the third round of base does not count.
    assert results.adapter_cost("loraplex") == pytest.approx(1.375)
    assert results.adapter_cost("slow") is None
    (line,) = [line for line in report.notes(results) if "adapters of mixed" in line]
    assert line.endswith("in time of base: Loraplex 1.38x")
    del content["workloads"]["base"]
    assert not [line for line in report.notes(results) if "adapters of mixed" in line]


def test_next_to_nothing_before_the_limit_is_no_speed_and_gives_no_ratio(
    content: dict[str, Any],
) -> None:
    content["runs"] += [_run("crawls", 0, 0.02, errors=4, is_cut=True, output_tokens=1)]
    content["contenders"]["crawls"] = {"title": "Crawls", "cannot": [], "weights": ""}
    results = Results(content)

    assert results.ratio("mixed", "crawls") is None
    assert results.failure("mixed", "crawls") == "1 of 400 tokens came within 60 s"
    assert "1 of 400 tokens came within 60 s" in _printed(content)
    (group,) = report.chart_groups(results)
    assert [bar.value for bar in group.bars if bar.label == "Crawls"] == [None]
    # One token for each request, and it counts.
    content["runs"][-1]["output_tokens"] = 4
    assert results.ratio("mixed", "crawls") == pytest.approx(5000.0)
