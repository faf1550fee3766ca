"""`loraplex eval` against a control API that serves, with a worker beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.control.stand import BASE, Stand
from tests.platform.evals.stand import NEVER, case, working
from tests.support.command_line import commands


@pytest.fixture
async def stand(db_url: str, redis_url: str, short_tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand.open(db_url, redis_url, short_tmp_path) as opened:
        yield opened


async def test_a_suite_is_imported_run_shown_compared_and_exported(
    stand: Stand, tmp_path: Path
) -> None:
    await stand.tenant("acme")
    file = tmp_path / "golden.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in (case("a"), case("b", NEVER))) + "\n")
    on = ("-t", "acme")
    async with (
        commands(stand) as run,
        working(stand.db, stand.redis_url, stand.folder / "model"),
    ):
        done = await run("eval", "import", "golden", str(file), *on, "--threshold", "0.5")
        assert done.code == 0, done
        assert "golden version 1, 2 cases" in done.out

        passed = await run("eval", "run", "golden", *on, "-d", BASE, "--json")
        assert passed.code == 0, passed
        first = json.loads(passed.out)
        assert (first["state"], first["score"]) == ("passed", 0.5)

        await run("eval", "import", "golden", str(file), *on, "--threshold", "0.6")
        failed = await run("eval", "run", "golden", *on, "-d", BASE)
        assert failed.code == 1
        assert "golden version 2: failed, score 0.5000" in failed.out
        second = failed.out.split()[0]

        shown = await run("eval", "show", second, *on, "--failed", "--json")
        assert [row["case_id"] for row in json.loads(shown.out)["results"]] == ["b"]
        charted = await run("eval", "series", "golden", *on)
        rows = [line.split() for line in charted.out.splitlines()]
        assert [(row[2], row[5], row[6]) for row in rows[1:]] == [
            (first["id"], "passed", "0.5000"),
            (second, "failed", "0.5000"),
        ]
        points = json.loads((await run("eval", "series", "golden", *on, "--json")).out)["data"]
        assert [point["run_id"] for point in points] == [first["id"], second]
        compared = await run("eval", "compare", first["id"], second, *on)
        assert "2 cases in both, 2 with the same answer; McNemar p = 1" in compared.out
        exported = await run("eval", "export", "golden", *on)
        (tmp_path / "again.jsonl").write_text(exported.out)
        again = await run(
            "eval", "import", "golden", str(tmp_path / "again.jsonl"), *on, "--threshold", "0.6"
        )
        assert "golden version 2, 2 cases" in again.out
        for what in ("suites", "runs", "schedules"):
            listed = await run("eval", "list", what, *on, "--json")
            assert listed.code == 0, listed
            assert len(json.loads(listed.out)) == {"suites": 1, "runs": 2, "schedules": 0}[what]


async def test_a_wrong_file_names_line_and_field(stand: Stand, tmp_path: Path) -> None:
    await stand.tenant("acme")
    file = tmp_path / "golden.jsonl"
    async with commands(stand) as run:
        for text, said in (
            (json.dumps(case("a")) + "\n{", "line 2: not JSON"),
            (
                "\n" + json.dumps(case("a") | {"wieght": 1}),
                "line 2: wieght: there is no such field",
            ),
        ):
            file.write_text(text)
            done = await run("eval", "import", "golden", str(file), "-t", "acme")
            assert (done.code, done.out) == (1, "")
            assert said in done.err
        nobody = await run("eval", "run", "golden", "-t", "acme", "-d", BASE)
        assert (nobody.code, "there is no eval suite golden" in nobody.err) == (1, True)


async def test_schedules_and_traces(stand: Stand, tmp_path: Path) -> None:
    await stand.tenant("acme")
    file = tmp_path / "golden.jsonl"
    file.write_text(json.dumps(case("a")))
    on = ("-t", "acme")
    async with commands(stand) as run:
        await run("eval", "import", "golden", str(file), *on)
        made = await run(
            *("eval", "schedule", "create", "nightly", "golden", *on, "-d", BASE),
            *("--cron", "0 3 * * *", "--zone", "Europe/Berlin", "--json"),
        )
        schedule = json.loads(made.out)
        assert schedule["zone"] == "Europe/Berlin"
        off = await run("eval", "schedule", "switch", schedule["id"], "off", *on)
        assert off.code == 0, off
        listed = await run("eval", "list", "schedules", *on)
        assert "nightly  0 3 * * *  Europe/Berlin  off" in listed.out
        gone = await run("eval", "schedule", "delete", schedule["id"], *on)
        assert gone.code == 0, gone
        trace = await run("eval", "record", str(tmp_path / "trace.jsonl"), *on)
        assert (trace.code, "no finished request" in trace.err) == (1, True)
