"""Launch plans: the committed tables are whole, and a file that is not says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loraplex_kernels.plans import COLUMNS, PLANS_FOLDER, PlanError, PlanTable, When, open_plans
from loraplex_kernels.support import ARCHITECTURES

KERNELS = sorted({path.stem for path in PLANS_FOLDER.glob("*/*.json")})


def plan(reason: str = "r", **config: int) -> dict[str, object]:
    return {"config": config, "num_warps": 4, "num_stages": 2, "reason": reason}


def entry(when: dict[str, object], fast: int, invariant: int = 0) -> dict[str, object]:
    return {"when": when, "fast": plan(BLOCK=fast), "invariant": plan(BLOCK=invariant)}


def write(folder: Path, document: object, name: str = "k") -> PlanTable:
    path = folder / "sm_90" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return PlanTable("sm_90", "fast", folder)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_has_plans_for_every_architecture(arch: str, kernel: str) -> None:
    for column in COLUMNS:
        table = open_plans(arch, column)
        assert table.entries(kernel)
        assert table.choose(kernel, phase="decode", tokens=10**9, rank=10**9, k=10**9, n=10**9)


def test_the_first_entry_whose_bounds_hold_wins(tmp_path: Path) -> None:
    entries = [
        entry({"phase": "decode", "max_tokens": 16, "max_rank": 64}, 1),
        entry({"dtype": "fp32"}, 2),
        entry({"max_k": 4096, "max_n": 512}, 3),
        entry({}, 4),
    ]
    table = write(tmp_path, {"kernel": "k", "arch": "sm_90", "entries": entries})

    def chosen(**launch: object) -> int:
        return table.choose("k", **{"phase": "decode", "tokens": 1, **launch}).config["BLOCK"]

    assert chosen(tokens=16, rank=64) == 1
    assert chosen(tokens=17, k=4096, n=512) == 3
    assert chosen(tokens=16, rank=65, dtype="fp32") == 2
    assert chosen(phase="prefill", k=4097) == 4
    assert chosen(phase="prefill", k=1, n=513) == 4
    # Asked again, the answer is looked up; it is the same.
    assert chosen(tokens=16, rank=64) == 1


def test_a_plan_says_where_it_is_from_and_how_to_launch(tmp_path: Path) -> None:
    document = {
        "kernel": "k",
        "arch": "sm_90",
        "entries": [entry({"max_k": 8}, 1), entry({}, 2, 3)],
    }
    write(tmp_path, document)

    small, last = PlanTable("sm_90", "invariant", tmp_path).entries("k")

    assert (small.plan.label, last.plan.label) == ("invariant: k<=8", "invariant: any")
    assert last.when == When()
    assert last.plan.launch() == {
        "BLOCK": 3,
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }


GOOD = {"kernel": "k", "arch": "sm_90", "entries": [entry({}, 1)]}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "not valid JSON"),
        ([], "the file must be an object"),
        ({**GOOD, "kernel": "other"}, "not that of the path"),
        ({**GOOD, "arch": "sm_80"}, "not that of the path"),
        ({**GOOD, "entries": []}, "entries is empty"),
        ({**GOOD, "entries": [entry({"max_k": 1}, 1)]}, "the last entry has bounds"),
        ({**GOOD, "entries": [entry({"min_k": 1}, 1)]}, "entry 0: when may have"),
        ({**GOOD, "entries": [entry({"phase": "mixed"}, 1)]}, "entry 0: phase 'mixed'"),
        ({**GOOD, "entries": [entry({"dtype": "fp64"}, 1)]}, "entry 0: dtype 'fp64'"),
        ({**GOOD, "entries": [entry({"max_k": "1"}, 1)]}, "bounds must be integers"),
        ({**GOOD, "entries": [{"when": {}, "fast": plan()}]}, "entry 0 must be an object with"),
        (
            {**GOOD, "entries": [{**entry({}, 1), "fast": {**plan(), "num_warps": "4"}}]},
            "entry 0, fast: config, warps and stages must be integers",
        ),
        (
            {**GOOD, "entries": [{**entry({}, 1), "fast": plan(reason="")}]},
            "entry 0, fast: reason is empty",
        ),
    ],
)
def test_a_malformed_file_is_named_with_its_fault(
    document: object, problem: str, tmp_path: Path
) -> None:
    table = write(tmp_path, document)

    with pytest.raises(PlanError, match=r"k\.json: ") as caught:
        table.entries("k")
    assert problem in str(caught.value)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(PlanError, match="no plans for sm_70: there are sm_100, sm_80"):
        open_plans("sm_70", "fast")
    with pytest.raises(PlanError, match=r"nothing\.json does not exist"):
        open_plans("sm_90", "fast").entries("nothing")
