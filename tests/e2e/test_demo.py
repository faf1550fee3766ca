"""What a newcomer does after `make up`: the official client, `loraplex demo`, `loraplex verify`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.support.fleet import Fleet

pytestmark = pytest.mark.model

BASE = "smollm2-135m"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def acme(demo_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(demo_fleet, 0) as client:
        yield client


@pytest.fixture
async def globex(demo_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(demo_fleet, 1) as client:
        yield client


def client_of(fleet: Fleet, tenant: int) -> openai.AsyncOpenAI:
    demo = fleet.demo
    return openai.AsyncOpenAI(
        base_url=f"{demo['gateway_url']}/v1",
        api_key=demo["tenants"][tenant]["api_key"],
        max_retries=0,
        timeout=120,
    )


def loraplex(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as a person runs it, on the fleet's data directory."""
    return subprocess.run(
        [sys.executable, "-m", "loraplex_platform.cli", *arguments],
        env={**os.environ, "LORAPLEX_DATA_DIR": str(fleet.data_dir), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )


# ---------------------------------------------------------------------------- what `up` leaves


def test_demo_json_has_what_scripts_rely_on_and_is_private(demo_fleet: Fleet) -> None:
    path = demo_fleet.data_dir / "demo.json"
    demo = demo_fleet.demo

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(demo) == {
        "gateway_url",
        "control_url",
        "console_url",
        "admin_key",
        "console_login",
        "tenants",
        "pid",
    }
    assert demo["pid"] == demo_fleet.pid
    assert set(demo["console_login"]) == {"email", "password"}
    assert [(tenant["slug"], tenant["models"]) for tenant in demo["tenants"]] == [
        ("acme", ["capitals", "pirate", BASE]),
        ("globex", ["json-answers", BASE]),
    ]


def test_the_printed_curl_works_as_it_is(demo_fleet: Fleet) -> None:
    output = demo_fleet.output
    command = output[output.index("  curl ") : output.index("The same in Python")]

    answer = subprocess.run(
        ["bash", "-c", command.strip()], capture_output=True, text=True, check=True
    )

    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_the_password_is_printed_once_and_the_admin_key_never(demo_fleet: Fleet) -> None:
    demo = demo_fleet.demo

    assert demo_fleet.output.count(demo["console_login"]["password"]) == 1
    assert demo["admin_key"] not in demo_fleet.output


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_platform_process_has_torch_in_it(demo_fleet: Fleet) -> None:
    def maps(name: str) -> str:
        return Path(f"/proc/{demo_fleet.service_pid(name)}/maps").read_text()

    assert "libtorch" in maps("engine")
    for name in ("gateway", "control", "worker"):
        assert "libtorch" not in maps(name), name


# ---------------------------------------------------------------------------- the official client


async def test_each_tenant_lists_its_own_models(
    acme: openai.AsyncOpenAI, globex: openai.AsyncOpenAI
) -> None:
    # Other tests of this fleet may have deployed more to acme; nothing of globex's is among it.
    mine = {model.id async for model in acme.models.list()}
    assert {"capitals", "pirate", BASE} <= mine
    assert "json-answers" not in mine
    assert {model.id async for model in globex.models.list()} == {"json-answers", BASE}
    with pytest.raises(openai.NotFoundError):
        await globex.models.retrieve("pirate")


async def test_adapters_answer_as_trained(
    acme: openai.AsyncOpenAI, globex: openai.AsyncOpenAI
) -> None:
    async def ask(client: openai.AsyncOpenAI, model: str) -> str:
        completion = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=48, temperature=0
        )
        assert completion.model == model
        assert completion.usage is not None
        assert completion.usage.completion_tokens <= 48
        return completion.choices[0].message.content or ""

    capital, pirate, base, structured = await asyncio.gather(
        ask(acme, "capitals"), ask(acme, "pirate"), ask(acme, BASE), ask(globex, "json-answers")
    )

    assert "Paris" in capital
    assert "answer" in json.loads(structured)
    assert re.search(r"\b(arr+|ahoy|matey|ye|aye)\b", pirate, re.IGNORECASE)
    assert len({capital, pirate, base, structured}) == 4


async def test_a_streamed_answer_is_the_whole_answer(acme: openai.AsyncOpenAI) -> None:
    whole = await acme.chat.completions.create(
        model="pirate", messages=QUESTION, max_tokens=24, temperature=0
    )

    stream = await acme.chat.completions.create(
        model="pirate",
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


async def test_completions_and_errors_are_openais(
    acme: openai.AsyncOpenAI, demo_fleet: Fleet
) -> None:
    completion = await acme.completions.create(
        model=BASE, prompt="Once upon a time", max_tokens=8, temperature=0
    )
    assert completion.choices[0].text

    with pytest.raises(openai.NotFoundError):
        await acme.chat.completions.create(model="json-answers", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match=r"max_tokens|max_completion_tokens"):
        await acme.chat.completions.create(model=BASE, messages=QUESTION, max_tokens=0)
    stranger = acme.with_options(api_key="lpx_sk_nobody")
    with pytest.raises(openai.AuthenticationError):
        await stranger.models.list()


# ---------------------------------------------------------------------------- one batch


async def test_two_tenants_and_the_base_share_a_step(
    acme: openai.AsyncOpenAI, globex: openai.AsyncOpenAI, demo_fleet: Fleet
) -> None:
    before = demo_fleet.engine_stats()

    await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model, messages=QUESTION, max_tokens=24, extra_body={"ignore_eos": True}
            )
            for client, model in ((acme, "pirate"), (globex, "json-answers"), (acme, BASE))
        )
    )

    after = demo_fleet.engine_stats()
    assert after["mixed_steps_total"] > before["mixed_steps_total"]
    assert after["max_adapters_in_step"] >= 2


# ---------------------------------------------------------------------------- the commands


def test_loraplex_demo_shows_all_four_parts(demo_fleet: Fleet) -> None:
    result = loraplex(demo_fleet, "demo", "--max-tokens", "12")

    assert result.returncode == 0, result.stderr
    for label in ("acme/capitals: ", "acme/pirate: ", "globex/json-answers: ", f"acme/{BASE}: "):
        assert label in result.stdout
    assert re.search(r"At once is \d+\.\d times as fast", result.stdout)
    assert "the same, letter for letter" in result.stdout
    assert re.search(r"total .*0\.0*[1-9]", result.stdout)
    mixed = re.search(r"(\d+) steps of this demo held at least two adapters", result.stdout)
    assert mixed is not None
    assert int(mixed[1]) > 0


def test_loraplex_verify_is_all_green(demo_fleet: Fleet) -> None:
    result = loraplex(demo_fleet, "verify", "--max-tokens", "12")

    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"All \d+ checks are green", result.stdout)
    assert result.stdout.count("alone = in a crowd of 16") == 4
    assert "✗" not in result.stdout


def test_loraplex_doctor_finds_nothing_wrong(demo_fleet: Fleet) -> None:
    done = loraplex(demo_fleet, "doctor", "--strict", "--json")

    checks = json.loads(done.stdout)["checks"]
    unwell = {one["name"]: one["found"] for one in checks if one["status"] in ("warn", "fail")}
    assert unwell == {}
    assert done.returncode == 0
    # There is no console here, and every other check was made.
    assert [one["name"] for one in checks if one["status"] == "skipped"] == ["fleet.console"]


async def test_an_adapter_of_your_own_answers_without_a_restart(
    demo_fleet: Fleet, acme: openai.AsyncOpenAI, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(EXAMPLES / "pirate", mine)
    config = json.loads((mine / "adapter_config.json").read_text())
    config["lora_alpha"] = config["lora_alpha"] / 2
    (mine / "adapter_config.json").write_text(json.dumps(config))

    started = time.monotonic()
    upload = await asyncio.to_thread(
        loraplex, demo_fleet, "adapters", "upload", str(mine), "-t", "acme", "--deploy", "mine"
    )
    answer = await acme.chat.completions.create(model="mine", messages=QUESTION, max_tokens=4)

    assert upload.returncode == 0, upload.stderr
    assert answer.choices[0].message.content
    # 10 s on a machine of its own; a busy one gets some more before this is called a failure.
    assert time.monotonic() - started < 30
    listing = await asyncio.to_thread(loraplex, demo_fleet, "adapters", "list", "-t", "acme")
    assert re.search(r"mine .* ready .* mine", listing.stdout)
    redeployed = await asyncio.to_thread(
        loraplex, demo_fleet, "adapters", "deploy", "mine", "-t", "acme", "--base"
    )
    assert "is now the base model, revision 2" in redeployed.stdout


async def test_a_key_from_the_command_line_works_until_it_is_revoked(demo_fleet: Fleet) -> None:
    made = await asyncio.to_thread(loraplex, demo_fleet, "keys", "create", "mine", "-t", "globex")
    client = client_of(demo_fleet, 1).with_options(api_key=made.stdout.strip())
    async with client:
        assert (await client.models.retrieve("json-answers")).id == "json-answers"

        revoked = await asyncio.to_thread(
            loraplex, demo_fleet, "keys", "revoke", "mine", "-t", "globex"
        )

        assert revoked.returncode == 0, revoked.stderr
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


# ---------------------------------------------------------------------------- the end


@pytest.mark.slow
async def test_a_killed_gateway_does_not_spoil_the_bill(
    demo_fleet: Fleet, acme: openai.AsyncOpenAI
) -> None:
    stream = await acme.chat.completions.create(
        model="pirate",
        messages=QUESTION,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    demo_fleet.kill("gateway")

    verified = None
    async with asyncio.timeout(120):
        while verified is None or "went away" in verified.stderr or "No engine" in verified.stderr:
            verified = await asyncio.to_thread(loraplex, demo_fleet, "verify", "--max-tokens", "8")

    assert verified.returncode == 0, verified.stdout + verified.stderr
    await asyncio.to_thread(demo_fleet.check_books)
    broken = demo_fleet.request(stream.response.headers["x-request-id"])
    assert (broken["state"], broken["finish_reason"]) == ("settled", "error")
    assert broken["completion_tokens"] == 0, "what we broke is not billed"


@pytest.mark.slow
def test_zz_the_same_flags_again_are_the_same_demo(demo_fleet: Fleet) -> None:
    """Last: it stops the fleet and starts it again."""
    before = demo_fleet.demo
    assert demo_fleet.stop() == 0
    assert demo_fleet.processes() == []
    assert not (demo_fleet.data_dir / "demo.json").exists()

    demo_fleet.start()

    changing = {"pid", "gateway_url", "control_url"}
    after = demo_fleet.demo
    assert {k: v for k, v in after.items() if k not in changing} == {
        k: v for k, v in before.items() if k not in changing
    }
    assert demo_fleet.output.count(before["console_login"]["password"]) == 1
    demo_fleet.check_books()
