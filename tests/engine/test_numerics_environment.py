"""What the libraries below torch are told before they are loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import loraplex_engine
import pytest
from loraplex_engine.numerics_environment import prepare_numerics, unlimited_environment

EVERYWHERE = {
    "GOMP_SPINCOUNT": "2000",
    "OPENBLAS_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
ON_INTEL = EVERYWHERE | {"MKL_CBWR": "AUTO,STRICT"}
NAMES = ON_INTEL.keys()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is set; what they were comes back."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # remembers it, even where it was not set
        monkeypatch.delenv(name)


def settings() -> dict[str, str]:
    """What is set now."""
    return {name: os.environ[name] for name in NAMES & os.environ.keys()}


def cpu_info_of(vendor: str, folder: Path) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    return path


def test_all_of_them_are_told_on_intel(tmp_path: Path) -> None:
    prepare_numerics(cpu_info_of("GenuineIntel", tmp_path))

    assert settings() == ON_INTEL


def test_mkl_is_left_alone_on_other_cpus(tmp_path: Path) -> None:
    prepare_numerics(cpu_info_of("AuthenticAMD", tmp_path))

    assert settings() == EVERYWHERE


def test_and_where_the_cpu_is_unknown(tmp_path: Path) -> None:
    prepare_numerics(tmp_path / "none")

    assert settings() == EVERYWHERE


def test_what_an_operator_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "theirs")

    prepare_numerics(cpu_info_of("GenuineIntel", tmp_path))

    assert settings() == dict.fromkeys(NAMES, "theirs")


def test_a_child_may_be_given_all_that_the_cpu_has(tmp_path: Path) -> None:
    assert unlimited_environment() is None  # it has

    prepare_numerics(cpu_info_of("GenuineIntel", tmp_path))

    environment = unlimited_environment()
    assert environment is not None
    assert os.environ.items() - environment.items() == {("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")}


def test_who_tells_them_has_loaded_nothing_that_listens() -> None:
    folder = Path(loraplex_engine.__file__).parent
    callers = [
        ".".join(("loraplex_engine", *path.relative_to(folder).with_suffix("").parts))
        for path in sorted(folder.rglob("*.py"))
        if re.search(r"^ +prepare_numerics\(\)", path.read_text(), re.MULTILINE)
    ]
    assert {"loraplex_engine.server_cli", "loraplex_engine.inspection"} <= set(callers)

    # One process for all: none of them may.
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; "
    code += "print({'numpy', 'torch', 'scipy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code, *callers], capture_output=True, text=True, check=False
    )

    assert (done.stdout.strip(), done.stderr) == ("set()", "")
