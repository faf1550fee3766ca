"""What the docs name exists: metrics, log lines, alerts, commands and their flags, pages, figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from loraplex_admin.catalog import PAGES as CONSOLE
from loraplex_engine.server_cli import make_parser
from loraplex_platform import reference

from tests.support import screenshots
from tests.support.command_tree import COMMANDS, TREE, groups, options_of

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
    assert sum(files.values()) <= screenshots.MAX_BYTES_IN_ALL


def test_every_page_of_the_console_has_its_section_with_all_its_looks() -> None:
    sections = (ROOT / "docs/console.md").read_text().split("\n### ")[1:]

    assert [one.partition("\n")[0] for one in sections] == [page.title for page in CONSOLE]
    for page, text in zip(CONSOLE, sections, strict=True):
        pictures = re.findall(r"\(screenshots/([\w-]+)\.png\)", text)
        wanted = [screenshots.name_of(look, page.path) for look in screenshots.LOOKS]
        assert list(dict.fromkeys(pictures)) == wanted


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands() -> dict[tuple[str, ...], Any]:
    """Of the tree, groups too."""
    return dict(groups(TREE)) | COMMANDS


def mistakes(shown: Iterable[str]) -> list[str]:
    """Of commands as they are named in prose: those that there are not, and those without such a flag."""
    tree = commands()
    wrong = []
    for line in shown:
        words = line.split()
        if "|" in words[0]:
            continue  # several at once, as a module's header names them
        at: tuple[str, ...] = ()
        while len(at) < len(words) and (*at, words[len(at)]) in tree:
            at = (*at, words[len(at)])
        rest = words[len(at) :]
        is_group = at not in COMMANDS
        if is_group and rest and not rest[0].startswith(("-", "COMMAND")):
            wrong.append(f"{line}: no such command")
            continue
        flags = {word.split("=")[0] for word in rest if word.startswith("--")}
        unknown = flags - flags_of(at)
        if unknown:
            wrong.append(f"{line}: {sorted(unknown)}")
    return wrong


def flags_of(at: tuple[str, ...]) -> set[str]:
    """What may follow a command's words."""
    known = options_of(commands()[at]) | {"--help", "--install-completion", "--show-completion"}
    if at == ("engine",):  # it passes them on
        known |= {flag for action in make_parser({})._actions for flag in action.option_strings}
    if at[:1] == ("bench",):  # so does this; `bench` alone is `bench run`
        text = (ROOT / "bench/run.py").read_text()
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))
    return known


def named_in(text: str) -> list[str]:
    """Commands in backquotes, without the `loraplex`."""
    return [
        re.sub(r"\{[^}]*\}", "X", line).strip()
        for line in re.findall(r"`loraplex(?: ([^`\n]+))?`", text)
        if line
    ]


def typed_in(page: Path) -> list[str]:
    """Commands in a page's blocks of code, as they are typed."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line):
                typed = re.search(r"(?:^|\bexec \w+ |\(|\s)loraplex (-?[^#]+)", part)
                if typed is not None:
                    # What is far to the right explains it.
                    found.append(re.split(r"\s{3,}(?!-)|>", typed[1])[0].strip())
    return found


WITH_COMMANDS = [
    *(page for page in PAGES if page.name != "reference.md"),  # which is made from the tree itself
    *sorted((ROOT / "docs/adr").glob("*.md")),
    ROOT / "ARCHITECTURE.md",
]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_command_that_a_page_names_is_one_with_its_flags(page: Path) -> None:
    assert mistakes([*named_in(page.read_text()), *typed_in(page)]) == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_command_that_a_page_has_one_type_can_be_typed(page: Path) -> None:
    wrong = []
    for line in typed_in(page):
        words = shlex.split(line)
        at: tuple[str, ...] = ()
        while len(at) < len(words) and (*at, words[len(at)]) in commands():
            at = (*at, words[len(at)])
        if at not in COMMANDS or at == ("engine",) or "..." in words:
            continue  # a flag of `loraplex` itself; the engine's own are looked at above
        try:
            COMMANDS[at].make_context(at[-1], words[len(at) :])
        except Exception as error:  # noqa: BLE001 - whatever the command line finds wrong with it
            if "does not exist" not in str(error):  # a file of the example's
                wrong.append(f"{line}: {error}")

    assert wrong == []


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_module_target_and_path_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    roots = ("", "platform", "engine", "kernels", "admin_ui")

    modules = [
        name
        for name in re.findall(r"\bpython -m ([a-z_][\w.]*\w)", text)
        if name not in {"venv", "pip", "pytest"}
        and not any(
            (ROOT / root / name.replace(".", "/")).with_suffix(".py").exists()
            or (ROOT / root / name.replace(".", "/") / "__main__.py").exists()
            for root in roots
        )
    ]
    made = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE)) - targets
    # As they are named from the root of the repository.
    named = re.findall(
        r"(?<![\w/.])((?:docs|deploy|bench|tests|examples|migrations|platform|engine|kernels|admin_ui)"
        r"/[\w./-]*[\w-])",
        text,
    )
    missing = [path for path in named if "..." not in path and not list(ROOT.glob(f"{path}*"))]
    assert (modules, made, missing) == ([], set(), [])


def test_commands_are_found_in_pages() -> None:
    typed = [line for page in WITH_COMMANDS for line in typed_in(page)]
    named = [line for page in WITH_COMMANDS for line in named_in(page.read_text())]

    assert len(typed) > 20
    assert len(named) > 60
    assert mistakes(["keys creat x", "keys create --nme x", "doctor --strict"]) == [
        "keys creat x: no such command",
        "keys create --nme x: ['--nme']",
    ]


def test_every_command_that_our_own_messages_name_is_one_with_its_flags() -> None:
    wrong = []
    for path in sorted((ROOT / "platform").rglob("*.py")):
        text = re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # a string over two lines
        shown = named_in(text)
        if path.parent.name == "doctor":
            # Remedies are commands without backquotes.
            shown += [
                re.sub(r"\{[^}]*\}", "X", line).strip()
                for line in re.findall(r"(?<![`\w.])loraplex ([a-z][\w -]*[\w])", text)
                if not line.startswith("does not name")
            ]
        wrong += [f"{path.name}: {line}" for line in mistakes(map(until_prose, shown))]

    assert not wrong, "\n".join(wrong)


def until_prose(line: str) -> str:
    """The words of a command, up to the sentence around it."""
    words = line.split()
    for count in range(len(words), 0, -1):
        if tuple(words[:count]) in COMMANDS:
            return " ".join(
                [*words[:count], *(word for word in words[count:] if word.startswith("--"))]
            )
    return line


def test_flags_of_the_engine_that_the_runbook_names_exist() -> None:
    known = {flag for action in make_parser({})._actions for flag in action.option_strings}
    known |= {
        flag for c in commands().values() for p in c.params for flag in getattr(p, "opts", ())
    }
    text = (ROOT / "docs/runbook.md").read_text()

    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert len(named) > 10
    assert named - known == set()


@pytest.fixture(scope="module")
def rendered() -> str:
    """The reference as the code has it, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("LORAPLEX_")]:
            patch.delenv(name)
        return reference.render()


def test_the_reference_is_what_the_code_says(rendered: str) -> None:
    is_current = reference.FILE.read_text() == rendered

    assert is_current, "run python -m loraplex_platform.reference"


def test_a_reference_that_is_not_current_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "FILE", tmp_path / "reference.md")
    monkeypatch.setattr(reference, "render", lambda: "as it is")

    missing = reference.main(["--check"])
    assert reference.main([]) == 0
    current = reference.main(["--check"])
    (tmp_path / "reference.md").write_text("older")

    assert (missing, current, reference.main(["--check"])) == (1, 0, 1)
    assert "run python -m loraplex_platform.reference" in capsys.readouterr().err


def test_every_route_and_command_is_in_the_reference(rendered: str) -> None:
    for words in COMMANDS:
        assert f"| `{' '.join(words)}" in rendered, words
    assert "`POST /v1/chat/completions`" in rendered
    assert "`POST /admin/v1/tenants`" in rendered
    assert "`LORAPLEX_KEY_PEPPER` | needed | gateway, control |" in rendered


def test_figures_beside_peers_are_the_readmes() -> None:
    table = (ROOT / "docs/comparison.md").read_text().split("## Beside peers")[1].split("\n\n")[2]
    readme = (ROOT / "README.md").read_text()

    for row in table.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        start = name.split(" on this CPU")[0]
        (told,) = [line for line in readme.splitlines() if line.startswith(f"| {start} |")]
        for cell, ours in zip(cells, told.strip("|").split("|")[1:], strict=True):
            assert ours.strip().split(" (")[0] == cell, name


def test_what_is_said_of_peers_has_a_source() -> None:
    text = (ROOT / "docs/comparison.md").read_text()
    sources = dict(re.findall(r"^\[([a-z-]+)\]: (https://\S+)$", text, re.MULTILINE))
    table = text.split("| beyond speed |")[1].split("\n\n")[0].splitlines()[2:]

    said = [cell.strip() for row in table for cell in row.strip("|").split("|")[2:]]
    cited = [match[1] for cell in said if (match := re.search(r"\]\[([a-z-]+)\]$", cell))]
    assert len(said) == 3 * len(table) >= 18
    # What is not said at all needs none.
    assert {cell for cell in said if "][" not in cell} == {"by your code", "not stated"}
    assert set(cited) == set(sources)
    for row in text.split("| technique | here |")[1].split("\n\n")[0].splitlines()[2:]:
        # Whoever it is from, it says so.
        assert "(" not in row.split("|")[1] or "](https://" in row.split("|")[1], row


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
