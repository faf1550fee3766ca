"""Every kernel compiles for every architecture, ahead of time; and the command sees what it should see."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from loraplex_kernels import aot, aot_baseline
from loraplex_kernels.aot_build import Built, count_accesses
from loraplex_kernels.aot_registry import find_groups
from loraplex_kernels.plans import PLANS_FOLDER
from loraplex_kernels.support import ARCHITECTURES

from tests.support.aot_accesses import Accesses
from tests.support.aot_samples import SAMPLES

ROOT = Path(__file__).parents[2]
# A plan table is one of a kernel, but for the rows' routing, which is the host's, and decode's second launch,
# which goes by the first one's plan.
KERNELS = {path.stem for path in PLANS_FOLDER.glob("*/*.json")} - {"lora_route"} | {
    "paged_decode_combine",
    "sample_split",
}
FIELDS = {
    *("kernel", "arch", "dtype", "plan", "config", "shape", "registers", "shared_bytes", "spills"),
    *("wide", "narrow"),
    *("bytes_moved", "flops", "floor_us", "cpu_s", "failures"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1200)
def test_every_build_is_sound_and_not_worse_than_the_baseline() -> None:
    done = run("loraplex_kernels.aot", "--json", "--check")

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(set(row) == FIELDS for row in rows)
    built = {(row["kernel"], row["arch"]) for row in rows}
    assert built == {(kernel, arch) for kernel in KERNELS for arch in ARCHITECTURES}
    assert all(row["registers"] > 0 and row["floor_us"] > 0 for row in rows)
    assert not any(row["spills"] for row in rows)


def test_each_fault_is_found() -> None:
    done = run("tests.support.aot_samples")

    assert done.returncode == 0, done.stderr
    failures = {name: "; ".join(found) for name, found in json.loads(done.stdout).items()}
    assert set(failures) == set(SAMPLES)
    for name in ("sound copy", "sound product", "unaligned, as meant"):
        assert failures[name] == ""
    assert failures["unaligned"] == "no 16-byte access to global memory"
    assert failures["no product"] == "no mma.sync instruction"
    assert failures["too few rows for wgmma"] == "no wgmma.mma_async instruction"
    assert "bytes of registers are spilled" in failures["spills"]
    assert "shared memory, 101376 is the limit" in failures["too much shared memory"]
    assert "do not match the function: ['count']" in failures["argument forgotten"]
    assert "fp8e4nv not supported" in failures["no such type"]


def test_an_operand_that_loses_its_alignment_and_a_look_up_that_waits_are_found(
    tmp_path: Path,
) -> None:
    done = run("tests.support.aot_accesses")

    assert done.returncode == 0, done.stderr
    found: Accesses = json.loads(done.stdout)
    path = tmp_path / "baseline.json"
    for kernel, row in found["aligned"].items():
        sound, lost = Built(**row), Built(**found["unaligned"][kernel])
        aot_baseline.write([sound], path)
        assert sound.failures == lost.failures == []
        assert sound.wide > 0
        assert compare([sound], path) == []
        assert any("narrow" in line for line in compare([lost], path)), kernel
    # Rows and slot, rank and place of A; for an expand also B's, where h begins, and the scale.
    loads = found["loads_before_exit"]
    assert min(loads["lora_shrink"], loads["lora_rows_shrink"]) >= 4
    assert min(loads["lora_expand"], loads["lora_rows_expand"], loads["lora_embed"]) >= 6


def test_accesses_are_counted_by_their_width() -> None:
    wide = """
        ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        @%p1 st.global.L1::evict_first.v2.b64 [ %rd1 + 0 ], { %rd2, %rd3 };
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1], [%rd1, {%r2, %r3}], [%r4];
    """
    narrow = """
        ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
        ld.global.v4.b16 { %rs1, %rs2, %rs3, %rs4 }, [ %rd1 + 0 ];
        st.global.v2.b32 [ %rd1 + 0 ], { %r1, %r2 };
        cp.async.ca.shared.global [ %r1 + 16 ], [ %rd1 + 16 ], 0x4, %r2;
        ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r9 ];
    """
    assert count_accesses(wide) == (4, 0)
    assert count_accesses(narrow) == (0, 4)


def test_wrong_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert aot.main([]) == os.EX_USAGE
    assert "unset it" in capsys.readouterr().err
    for wrong in (
        ["--jobs", "0"],
        ["--arch", "sm_70"],
        ["--write-baseline", "--arch", "sm_90"],
    ):
        with pytest.raises(SystemExit, match="2"):
            aot.main(wrong)


def test_an_unknown_kernel_is_a_failure() -> None:
    done = run("loraplex_kernels.aot", "--kernel", "nothing")

    assert done.returncode == 1
    assert "no builds: no kernel is called nothing" in done.stderr


def test_a_selection_builds_only_that_and_prints_a_table() -> None:
    done = run("loraplex_kernels.aot", "--kernel", "head_norm", "--arch", "sm_90", "--jobs", "1")

    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split()[:5] == ["kernel", "arch", "dtype", "plan", "shape"]
    assert lines
    assert all(line.startswith("head_norm  sm_90") and line.endswith("ok") for line in lines)


def test_a_module_that_fails_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import loraplex_kernels.gated

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(loraplex_kernels.gated, "aot_cases", fail)
    find_groups.cache_clear()
    try:
        groups, problems = find_groups(("sm_80",), ())
    finally:
        find_groups.cache_clear()

    kernels = {group.cases[0].kernel for group in groups}
    assert problems == ("loraplex_kernels.gated: RuntimeError: broken",)
    assert "rms_norm" in kernels
    assert "gated" not in kernels


def test_columns_that_come_to_the_same_binary_are_built_once() -> None:
    groups, problems = find_groups(("sm_90",), ("rms_norm",))

    assert not problems
    assert all({case.plan.label[:4] for case in g.cases} == {"fast", "inva"} for g in groups)


def test_the_functions_beside_the_kernels_are_annotated() -> None:
    """mypy and ruff are told not to ask it of the jitted ones, and so ask it of none."""
    for path in sorted((ROOT / "kernels" / "loraplex_kernels").glob("*.py")):
        module = __import__(f"loraplex_kernels.{path.stem}", fromlist=["*"])
        for name, function in vars(module).items():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                parameters = inspect.signature(function).parameters
                missing = set(parameters) - set(function.__annotations__)
                assert not missing, f"{module.__name__}.{name}: {missing}"
                assert "return" in function.__annotations__, f"{module.__name__}.{name}"


ROW = Built(
    kernel="k",
    arch="sm_90",
    dtype="bf16",
    plan="fast: any",
    config={"BLOCK": 1},
    shape="T=1",
    registers=40,
    shared_bytes=1024,
    spills=0,
    wide=2,
    narrow=3,
    bytes_moved=1,
    flops=1,
    floor_us=1.0,
    cpu_s=1.0,
)


def compare(rows: list[Built], path: Path, **selection: object) -> list[str]:
    return aot_baseline.compare(rows, path=path, **{"archs": ["sm_90"], **selection})


def test_a_build_may_cost_few_registers_more_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    aot_baseline.write([ROW], path)

    assert aot_baseline.is_for_this_triton(path)
    assert compare([replace(ROW, registers=48, plan="another name")], path) == []
    assert compare([replace(ROW, registers=8, shared_bytes=0)], path) == []
    assert "registers 40 -> 49" in compare([replace(ROW, registers=49)], path)[0]
    assert "shared_bytes 1024 -> 1025" in compare([replace(ROW, shared_bytes=1025)], path)[0]
    assert "spills 0 -> 4" in compare([replace(ROW, spills=4)], path)[0]
    assert "narrow 3 -> 4" in compare([replace(ROW, narrow=4)], path)[0]
    assert compare([replace(ROW, narrow=2, wide=1)], path) == []


def test_a_build_that_comes_or_goes_needs_a_new_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    aot_baseline.write([ROW, replace(ROW, arch="sm_80")], path)
    changed = replace(ROW, config={"BLOCK": 2})

    assert ["not in the baseline" in line for line in compare([ROW, changed], path)] == [True]
    assert ["no plan makes it" in line for line in compare([], path)] == [True]
    assert compare([], path, kernels=["other"]) == []
    assert len(compare([], path, archs=["sm_90", "sm_80"])) == 2


def test_another_tritons_figures_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "baseline.json"
    aot_baseline.write([ROW], path)
    monkeypatch.setattr(triton, "__version__", "3.6.0")

    assert not aot_baseline.is_for_this_triton(path)
