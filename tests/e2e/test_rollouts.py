"""A version's way from the upload to all of a deployment's requests and back, on the real model with the demo's
adapters, each station seen in requests and ledger; and one that answers fluently beside the point, and is
taken back by its gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fleet import Fleet

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
COUNTRIES = ("France", "Japan", "Egypt", "Italy", "Spain", "Germany", "Russia", "Greece")
DEADLINE_S = 240.0
CONCURRENCY = 4

# What few requests can decide: the test is about the way, `tests/platform/rollouts` about how often gates are wrong.
SOON = {
    "abort_rate": None,
    "ttft": None,
    "itl": None,
    "error_rate": {"max_increase": 0.4, "min_requests": 20},
    "finish_reason": {"max_shift": 0.45, "min_requests": 20},
    "output_length": {"max_ratio": 4.0, "min_requests": 20},
    "logprob": {"max_drop": 1.5, "sample_bp": 10_000, "min_requests": 20},
}


class Tenant:
    """A tenant of the fleet, from both of its ends: the control API and the data plane."""

    def __init__(self, fleet: Fleet, slug: str) -> None:
        self.fleet = fleet
        self._http = httpx.Client(
            base_url=f"{fleet.state['control_url']}/admin/v1",
            headers={"authorization": f"Bearer {fleet.admin_key}"},
            timeout=60,
        )
        with fleet.admin() as admin:
            tenant_id = admin.create_tenant(slug, slug)["id"]
            self.secret = admin.create_key(tenant_id, "traffic")["secret"]
        self.path = f"/tenants/{tenant_id}"
        self.tenant_id = tenant_id

    def close(self) -> None:
        """Its connections."""
        self._http.close()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Below /admin/v1."""
        answer = self._http.request(method, path, json=body)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def of(self, method: str, path: str, body: Any = None) -> Any:
        """Below the tenant."""
        return self.call(method, f"{self.path}{path}", body)

    def upload(self, name: str, folder: Path) -> str:
        """The id of the version that it became."""
        with self.fleet.admin() as admin:
            version: str = admin.upload_adapter(self.tenant_id, name, folder)["version"]["id"]
            return version

    def requests_of(self, rollout_id: str) -> list[dict[str, Any]]:
        """What the request log has of a rollout, shadows and scores too."""
        rows: list[dict[str, Any]] = []
        after = ""
        while True:
            page = self.call(
                "GET",
                f"/requests?tenant_id={self.tenant_id}&rollout_id={rollout_id}&limit=100{after}",
            )
            rows += page["data"]
            if not page["has_more"]:
                return rows
            after = f"&after={page['data'][-1]['id']}"


@pytest.fixture
def tenant(demo_fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    slug = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    found = Tenant(demo_fleet, slug)
    yield found
    found.close()


class Traffic:
    """Users who ask, each again and again, until somebody has seen enough."""

    def __init__(
        self, tenant: Tenant, model: str, question: Callable[[int], str], **params: Any
    ) -> None:
        self._tenant = tenant
        self._model = model
        self._question = question
        self._params = params
        self.answers: list[tuple[str, str, str, str]] = []  # user, request id, revision, text

    async def until(self, is_enough: Callable[[], bool]) -> None:
        """Ask on until it is, several at a time; nobody's request may fail meanwhile."""
        numbers = itertools.count(len(self.answers))
        seen = asyncio.Event()
        async with (
            openai.AsyncOpenAI(
                base_url=f"{self._tenant.fleet.gateway_url}/v1",
                api_key=self._tenant.secret,
                max_retries=0,
                timeout=120,
            ) as client,
            asyncio.timeout(DEADLINE_S),
            asyncio.TaskGroup() as group,
        ):
            for _ in range(CONCURRENCY):
                group.create_task(self._ask_on(client, numbers, seen))
            while not seen.is_set():
                if await asyncio.to_thread(is_enough):
                    seen.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(seen.wait(), 0.5)

    async def _ask_on(
        self, client: openai.AsyncOpenAI, numbers: Iterator[int], seen: asyncio.Event
    ) -> None:
        while not seen.is_set():
            await self._ask(client, next(numbers))

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        user = f"user-{number % 61}"
        answer = await client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=[{"role": "user", "content": self._question(number)}],
            user=user,
            **self._params,
        )
        text = answer.parse().choices[0].message.content or ""
        self.answers.append(
            (user, answer.headers["x-request-id"], answer.headers["x-loraplex-revision"], text)
        )

    def revisions(self) -> dict[str, set[str]]:
        """Which revisions answered, by user."""
        found: dict[str, set[str]] = {}
        for user, _, revision, _ in self.answers:
            found.setdefault(user, set()).add(revision)
        return found


def capital_of(number: int) -> str:
    return f"What is the capital of {COUNTRIES[number % len(COUNTRIES)]}?"


def states_of(tenant: Tenant, rollout: dict[str, Any]) -> list[str]:
    """The rollout's events by kind, oldest first."""
    page = tenant.of("GET", f"/rollouts/{rollout['id']}/events?limit=100")
    return [event["kind"] for event in sorted(page["data"], key=lambda event: int(event["id"]))]


def watcher(tenant: Tenant, rollout: dict[str, Any], *states: str) -> Callable[[], bool]:
    """Whether the rollout is in one of the states; it must not end in another one."""

    def is_there() -> bool:
        rollout.update(tenant.of("GET", f"/rollouts/{rollout['id']}"))
        ended = rollout["state"] in ("promoted", "aborted", "rolled_back")
        assert rollout["state"] in states or not ended, (rollout["state"], rollout["end_reason"])
        return rollout["state"] in states

    return is_there


async def test_a_version_from_upload_to_promotion_and_back(
    demo_fleet: Fleet, tenant: Tenant, tmp_path: Path
) -> None:
    # Upload: two versions of one adapter, the second one scaled a little otherwise.
    first = tenant.upload("capitals", EXAMPLES / "capitals")
    second = tenant.upload("capitals", _scaled(EXAMPLES / "capitals", tmp_path / "v2"))
    tenant.of("PUT", "/deployments/capitals", {"version_id": first})
    canary = tenant.of("POST", "/deployments/capitals/revisions", {"version_id": second})
    stable_id = tenant.of("GET", "/deployments/capitals")["revision"]["id"]

    # Eval: the suite that it has to pass first.
    lines = [
        {
            "id": country,
            "messages": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "params": {"max_tokens": 12},
            "checks": [{"type": "contains", "value": capital}],
        }
        for country, capital in (("France", "Paris"), ("Japan", "Tokyo"), ("Egypt", "Cairo"))
    ]
    suite = tenant.of("POST", "/eval-suites", {"name": "capitals", "lines": lines})

    rollout = tenant.of(
        "POST",
        "/rollouts",
        {
            "deployment": "capitals",
            "canary": canary["id"],
            "sticky_by": "user",
            "steps": [
                {"kind": "shadow", "share_bp": 10_000, "hold_s": 0},
                {"kind": "canary", "weight_bp": 3000, "hold_s": 0},
                {"kind": "canary", "weight_bp": 6000, "hold_s": 0},
            ],
            "gate": SOON | {"offline": {"suite_id": suite["id"]}},
        },
    )
    assert (rollout["state"], rollout["changes"], rollout["warnings"]) == ("draft", ["adapter"], [])
    tenant.of("POST", f"/rollouts/{rollout['id']}/start", {})

    # Shadow and canary, while users ask.
    traffic = Traffic(tenant, "capitals", capital_of, max_tokens=12)
    await traffic.until(watcher(tenant, rollout, "shadow", "canary", "promoted"))
    in_shadow = len(traffic.answers)
    await traffic.until(watcher(tenant, rollout, "promoted"))
    promoted = len(traffic.answers)
    await traffic.until(lambda: len(traffic.answers) >= promoted + 2 * CONCURRENCY)

    # Nobody went back to the old one, and whoever asked last heard the new one.
    for user in traffic.revisions():
        mine = [revision for who, _, revision, _ in traffic.answers if who == user]
        assert mine == sorted(mine, key=[stable_id, canary["id"]].index), user
    assert {revision for _, _, revision, _ in traffic.answers[-CONCURRENCY:]} == {canary["id"]}
    assert all("apital" in text for *_, text in traffic.answers)

    # Roll back: one step, from the next request on.
    tenant.of("POST", f"/rollouts/{rollout['id']}/rollback", {"reason": "to see that it works"})
    before = len(traffic.answers)
    await traffic.until(lambda: len(traffic.answers) >= before + CONCURRENCY)
    assert {revision for _, _, revision, _ in traffic.answers[before + CONCURRENCY :]} <= {
        stable_id
    }
    assert tenant.of("GET", "/deployments/capitals")["revision"]["id"] == stable_id

    told = states_of(tenant, rollout)
    for kind in ("created", "started", "eval", "step", "promoted", "rolled_back"):
        assert kind in told, told
    assert told.count("step") == 3

    # All of it in the books.
    demo_fleet.check_books()
    rows = tenant.requests_of(rollout["id"])
    arms = Counter((row["kind"], row["arm"]) for row in rows)
    print(
        json.dumps(
            {
                "in_shadow": in_shadow,
                "promoted": promoted,
                "arms": {str(k): v for k, v in arms.items()},
            }
        )
    )
    assert min(arms["user", "stable"], arms["user", "canary"], arms["shadow", "shadow"]) >= 20, arms
    assert arms["shadow", None] >= 20, arms  # scores
    by_id = {row["id"]: row for row in rows}
    for _, request_id, revision, _ in traffic.answers[:promoted]:
        if request_id in by_id:
            assert by_id[request_id]["revision_id"] == revision
    # A tenant pays for what it was answered, and for nothing that was made beside it.
    one = {arm: next(row for row in rows if (row["kind"], row["arm"]) == arm) for arm in arms}
    for (kind, arm), row in one.items():
        [entry] = tenant.call("GET", f"/explain/{row['id']}")["answered_by"]["ledger"]
        assert entry["account"] == ("revenue" if kind == "user" else "absorbed"), (kind, arm)
        assert entry["revision_id"] == row["revision_id"]


async def test_a_canary_that_answers_fluently_beside_the_point_is_taken_back_by_its_gate(
    demo_fleet: Fleet, tenant: Tenant
) -> None:
    # The base answers; what is rolled out talks like a pirate whatever it is asked. Both stop at the limit.
    version = tenant.upload("pirate", EXAMPLES / "pirate")
    stable = tenant.of("PUT", "/deployments/story", {"version_id": None})["revision"]
    canary = tenant.of("POST", "/deployments/story/revisions", {"version_id": version})
    rollout = tenant.of(
        "POST",
        "/rollouts",
        {
            "deployment": "story",
            "canary": canary["id"],
            "sticky_by": "user",
            "steps": [{"kind": "canary", "weight_bp": 5000, "hold_s": 3600}],
            # Only what looks at lengths, ends, errors and speed, as everybody has, and the likelihood.
            "gate": {"logprob": {"max_drop": 0.3, "sample_bp": 10_000, "min_requests": 20}},
        },
    )
    tenant.of("POST", f"/rollouts/{rollout['id']}/start", {})
    traffic = Traffic(
        tenant,
        "story",
        lambda number: f"Tell me about {COUNTRIES[number % 8]} in one long sentence.",
        max_tokens=16,
    )
    await traffic.until(watcher(tenant, rollout, "canary"))
    began_s = time.monotonic()

    await traffic.until(watcher(tenant, rollout, "aborted"))

    took_s = time.monotonic() - began_s
    asked_canary = sum(revision == canary["id"] for *_, revision, _ in traffic.answers)
    print(
        json.dumps(
            {
                "seconds": round(took_s, 1),
                "canary_requests": asked_canary,
                "why": rollout["end_reason"],
            }
        )
    )
    assert "logprob" in rollout["end_reason"]
    assert asked_canary < 400
    # The full old revision, from the next request on.
    before = len(traffic.answers)
    await traffic.until(lambda: len(traffic.answers) >= before + 3 * CONCURRENCY)
    assert {revision for *_, revision, _ in traffic.answers[before + CONCURRENCY :]} == {
        stable["id"]
    }
    metrics = tenant.of("GET", f"/rollouts/{rollout['id']}/metrics")
    assert metrics["stable"]["mean_logprob"] - metrics["canary"]["mean_logprob"] > 0.3
    # Of the usual length, so that nothing else could have told.
    lengths = [metrics[side]["mean_output_tokens"] for side in ("stable", "canary")]
    assert max(lengths) < 1.5 * min(lengths)
    demo_fleet.check_books()


def _scaled(folder: Path, to: Path) -> Path:
    """The same adapter, a little stronger."""
    to.mkdir()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["lora_alpha"] *= 1.01
    (to / "adapter_config.json").write_text(json.dumps(config))
    (to / "adapter_model.safetensors").write_bytes(
        (folder / "adapter_model.safetensors").read_bytes()
    )
    return to
