"""What the docs name exists: metrics, log lines, alerts, commands and their flags, pages, figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from loraplex_engine.server_cli import make_parser
from loraplex_platform import reference
from loraplex_platform.cli import app

from tests.support import screenshots

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
ENTRY_PARTS = ("Symptom", "Shows", "Cause", "Remedy")


def sources() -> str:
    """Our code."""
    return "".join(
        path.read_text() for root in ("engine", "platform") for path in (ROOT / root).rglob("*.py")
    )


def metrics_of(code: str) -> set[str]:
    """Names that a process exports, without Prometheus's endings."""
    found = set(re.findall(r'"loraplex:([a-z0-9_]+)"', code))
    # The engine's own are named where they are read.
    found |= set(re.findall(r'_(?:gauge|counter|histogram)\(\s*"([a-z0-9_]+)"', code))
    return found | set(re.findall(r'histogram\(\s*\n?\s*"([a-z0-9_]+)"', code))


def events_of(code: str) -> set[str]:
    """Names of log lines."""
    return set(
        re.findall(
            r'(?:log|_log)\.(?:debug|info|warning|error|exception|critical)\(\s*"([a-z0-9_]+)"',
            code,
        )
    ) | set(re.findall(r'log_crash\(\s*"([a-z0-9_]+)"', code))


def entries() -> dict[str, str]:
    """The runbook's, by title."""
    text = (ROOT / "docs/runbook.md").read_text()
    parts = re.split(r"^### (.+)$", text, flags=re.MULTILINE)
    return {
        title: body.split("\n## ")[0] for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_metrics_and_log_lines_of_the_runbook_exist() -> None:
    code = sources()
    known_metrics, known_events = metrics_of(code), events_of(code)
    text = (ROOT / "docs/runbook.md").read_text() + (ROOT / "docs/operation.md").read_text()

    named = set(re.findall(r"loraplex:([a-z0-9_]+)", text))
    unknown = {
        name
        for name in named
        if not {name, re.sub(r"_(total|bucket|count|sum)$", "", name)} & known_metrics
    }
    assert len(named) > 40
    assert unknown == set()

    logged = {
        event
        for line in text.splitlines()
        for part in re.findall(r"\blog ((?:`[a-z0-9_]+`(?:, )?)+)", line)
        for event in re.findall(r"`([a-z0-9_]+)`", part)
    }
    assert len(logged) > 30
    assert logged - known_events == set()


def test_every_entry_of_the_runbook_has_its_four_parts_and_shows_something() -> None:
    found = entries()

    assert len(found) >= 20 + 6
    for title, body in found.items():
        parts = re.findall(r"^- \*\*(\w+)\*\*: (.+)", body, re.MULTILINE)
        assert tuple(name for name, _ in parts) == ENTRY_PARTS, title
        assert re.search(r"`[^`]+`", dict(parts)["Shows"]), title


def test_every_alert_has_an_entry() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus-rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    table = (ROOT / "docs/runbook.md").read_text().split("## Alerts")[1].split("\n## ")[0]

    assert set(re.findall(r"Loraplex\w+", table)) == alerts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)

    assert broken == []


def test_every_picture_of_the_console_is_shown_by_a_page_and_taken_by_a_test() -> None:
    files = {path.stem: path.stat().st_size for path in screenshots.FOLDER.glob("*")}
    shown = screenshots.shown_in_docs()

    # That what is shown exists is told by the links above.
    assert files.keys() - shown.keys() == set(), "no page shows them: delete them"
    assert shown.keys() - screenshots.taken_by_tests() == set()
    assert 0 < len(files) <= screenshots.MAX_FILES
    assert max(files.values()) <= screenshots.MAX_BYTES


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> dict[tuple[str, ...], Any]:
    """Of the tree, groups too."""

    def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
        yield words, command
        for name, child in (getattr(command, "commands", None) or {}).items():
            yield from walk(child, (*words, name))

    return dict(walk(typer.main.get_command(app)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_is_one_with_its_flags(page: Path) -> None:
    tree = commands()
    text = page.read_text().replace("\\\n", " ")
    if page.name == "reference.md":
        pytest.skip("made from the tree itself")
    shown = re.findall(
        r"(?:^|[\s`;/]|exec \w+ )loraplex ((?:[a-z][\w-]*|--?[\w-]+)[^`\n;|]*)", text
    )
    wrong = []
    for line in shown:
        words = line.split()
        at: tuple[str, ...] = ()
        while len(at) < len(words) and (*at, words[len(at)]) in tree:
            at = (*at, words[len(at)])
        if not at:
            if words[0].startswith("-"):
                at = ()
            elif re.fullmatch(r"[a-z][a-z-]+", words[0]) and "`loraplex " + words[0] in text:
                wrong.append(line)
                continue
            else:
                continue  # prose: "the loraplex command"
        flags = {word.split("=")[0] for word in words[len(at) :] if word.startswith("--")}
        known = {flag for p in tree[at].params for flag in getattr(p, "opts", ())}
        known |= {"--help", "--install-completion", "--show-completion"}
        if at[:1] in {("engine",), ("bench",)}:
            known |= {flag for a in make_parser({})._actions for flag in a.option_strings}
            known |= {"--workload", "--rounds"}
        if flags - known:
            wrong.append(f"{line}: {sorted(flags - known)}")

    assert wrong == []


def test_flags_of_the_engine_that_the_runbook_names_exist() -> None:
    known = {flag for action in make_parser({})._actions for flag in action.option_strings}
    known |= {
        flag for c in commands().values() for p in c.params for flag in getattr(p, "opts", ())
    }
    text = (ROOT / "docs/runbook.md").read_text()

    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert len(named) > 10
    assert named - known == set()


def test_the_reference_is_what_the_code_says() -> None:
    # A process of its own: it reads no environment of the tests.
    done = subprocess.run(
        [sys.executable, "-m", "loraplex_platform.reference", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_a_reference_that_is_not_current_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "reference.md")

    missing = reference.main(["--check"])
    assert reference.main([]) == 0
    current = reference.main(["--check"])
    (tmp_path / "reference.md").write_text("older")

    assert (missing, current, reference.main(["--check"])) == (1, 0, 1)
    assert "run python -m loraplex_platform.reference" in capsys.readouterr().err


def test_every_route_and_command_is_in_the_reference() -> None:
    text = reference.render()

    for words, command in commands().items():
        if getattr(command, "commands", None) is None:
            assert f"| `{' '.join(words)}" in text, words
    assert "`POST /v1/chat/completions`" in text
    assert "`POST /admin/v1/tenants`" in text
    assert "`LORAPLEX_KEY_PEPPER` | needed | gateway, control |" in text


def test_figures_beside_peers_are_the_readmes() -> None:
    table = (ROOT / "docs/comparison.md").read_text().split("## Beside peers")[1].split("\n\n")[2]
    readme = (ROOT / "README.md").read_text()

    for row in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        start = name.split(" on this CPU")[0]
        (told,) = [line for line in readme.splitlines() if line.startswith(f"| {start} |")]
        for cell, ours in zip(cells, told.strip("|").split("|")[1:], strict=True):
            assert ours.strip().split(" (")[0] == cell, name


@pytest.mark.slow
def test_figures_of_batching_are_the_simulators() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.simulate", "batching", "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = json.loads(done.stdout)["batching"]
    text = (ROOT / "docs/comparison.md").read_text()

    rows = {
        "static": "static: 16 together",
        "dynamic": "dynamic: what came",
        "continuous, fcfs": "continuous, first come",
        "continuous, priority": "continuous, by priority",
        "continuous, fair": "continuous, fair",
    }
    for name, start in rows.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        (total,) = [one for one in found[name]["tenants"] if one["tenant"] == "all"]
        assert cells[1:3] == [f"{total['served']:,}", f"{total['refused']:,}"]
        seconds = [float(cell.removesuffix(" s")) for cell in cells[3:6]]
        keys = ("ttft_p50_s", "ttft_p95_s", "itl_p95_s")
        assert seconds == pytest.approx([total[key] for key in keys], rel=0.01)
        assert float(cells[6]) == pytest.approx(total["output_tokens_per_s"], rel=0.01)
        assert float(cells[7]) == pytest.approx(total["goodput_per_s"], abs=0.005)


def test_the_readme_stays_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}

    named = set(re.findall(r"docs/([a-z]+\.md)", readme)) | set(
        re.findall(r"\(([a-z]+\.md)", (ROOT / "docs/operator.md").read_text())
    )
    assert pages - named == {"developer.md"} - named
    assert len(readme.splitlines()) < 260
