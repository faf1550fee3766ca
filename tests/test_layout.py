"""The repository's shape: what would hide the standard library, and what must not be committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT_ROOTS = ("platform", "engine", "kernels", "admin_ui")
PACKAGES = ("loraplex_platform", "loraplex_engine", "loraplex_kernels", "loraplex_admin")

# Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATHS = ("/" + "work/", "/" + "root/", "/" + "home/runner")
REGISTRY_HOSTS = (
    "pypi" + ".org",
    "python" + "hosted.org",
    "download." + "pytorch.org",
    "registry." + "npmjs.org",
    "proxy." + "golang.org",
    "deb." + "debian.org",
)


def tracked_files() -> list[Path]:
    """What git holds, without binary artifacts."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


@pytest.mark.parametrize("name", IMPORT_ROOTS)
def test_an_import_root_is_not_a_package(name: str) -> None:
    # With an __init__.py, `platform` would hide the standard library's for whatever starts here.
    assert not (ROOT / name / "__init__.py").exists()
    assert [path.name for path in (ROOT / name).iterdir() if path.is_dir()] == [
        package for package in PACKAGES if (ROOT / name / package).is_dir()
    ]


def test_the_standard_library_wins_in_the_repository() -> None:
    code = "import platform; print(platform.python_version())"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == sys.version.split()[0]


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {
        path.parent for path in (ROOT / "tests").rglob("*.py") if "__pycache__" not in path.parts
    }

    missing = [folder for folder in folders if not (folder / "__init__.py").exists()]

    # A chain with a gap makes `tests/platform` importable as `platform`.
    assert missing == []


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    clashes = [
        path.relative_to(ROOT)
        for root in IMPORT_ROOTS
        for path in (ROOT / root).rglob("*.py")
        if path.stem in sys.stdlib_module_names and path.stem not in {"__init__", "__main__"}
    ]

    assert clashes == []


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked_files():
        if not path.is_file() or path.suffix in {".safetensors", ".png"}:
            continue
        text = path.read_text(errors="replace")
        found += [
            f"{path.relative_to(ROOT)}: {word}"
            for word in (*MACHINE_PATHS, *REGISTRY_HOSTS)
            if word in text
        ]

    assert found == []


def test_the_pinned_versions_are_exact_and_name_no_build() -> None:
    lines = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"
    ]

    assert len(lines) > 50
    for line in lines:
        name, equals, version = line.partition("==")
        assert name, line
        assert equals, line
        # A local label (+cpu) would refuse everybody else's build of torch.
        assert "+" not in version, line
