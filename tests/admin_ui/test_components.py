"""What pages are made of: the budget of live figures, colours that can be read, one place for each thing."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import loraplex_admin
import pytest
from loraplex_admin.access import Access
from loraplex_admin.api import Api
from loraplex_admin.catalog import PAGES
from loraplex_admin.components import live
from streamlit.testing.v1 import AppTest

from tests.admin_ui.driver import checked
from tests.admin_ui.stand import Stand

CONFIG = Path(loraplex_admin.__file__).with_name(".streamlit") / "config.toml"
# WCAG 2.2, 1.4.3 and 1.4.11: words, and what is not words but has to be seen.
LEAST_TEXT, LEAST_SHAPE = 4.5, 3.0


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_themes_colours_can_be_read(scheme: str) -> None:
    theme = tomllib.loads(CONFIG.read_text())["theme"][scheme]
    sidebar = theme["sidebar"]
    grounds = (
        theme["backgroundColor"],
        theme["secondaryBackgroundColor"],
        sidebar["backgroundColor"],
        sidebar["secondaryBackgroundColor"],
    )

    for ground in grounds:
        assert contrast(theme["textColor"], ground) >= LEAST_TEXT
        assert contrast(theme["linkColor"], ground) >= LEAST_TEXT
        assert contrast(theme["primaryColor"], ground) >= LEAST_SHAPE
    # A button's words are white on it.
    assert contrast("#ffffff", theme["primaryColor"]) >= 4.0
    for colour in theme["chartCategoricalColors"]:
        assert contrast(colour, theme["backgroundColor"]) >= LEAST_SHAPE


class Counting(httpx.BaseTransport):
    """Counts the calls that go through."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.calls[request.url.path] += 1
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def _script(path, api, access):  # AppTest runs its text alone
    from loraplex_admin.catalog import PAGES

    next(page for page in PAGES if page.path == path).render(api, access)


def rollout_under_way(platform: Stand, tenant_id: str) -> str:
    """One that its page watches; its id."""
    path = f"/tenants/{tenant_id}"
    platform.deploy(tenant_id, "watched", None)
    params = {"version_id": None, "params": {"system_prompt": "Be brief."}}
    platform.post(f"{path}/deployments/watched/revisions", json=params)
    steps = [{"kind": "canary", "weight_bp": 100, "hold_s": 86_400}]
    made = platform.post(f"{path}/rollouts", json={"deployment": "watched", "steps": steps})
    platform.post(f"{path}/rollouts/{made['id']}/start")
    return str(made["id"])


def test_live_figures_keep_to_one_call_a_second(
    platform: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is drawn once here, so what it asks is what one of its rounds asks."""
    rounds: dict[str, list[float]] = {}
    transport = Counting()
    real = live.live

    def watched(draw: Any, *, calls: int, every_s: float = 3.0) -> None:
        def counted() -> None:
            before = transport.calls.total()
            draw()
            told = transport.calls.total() - before
            assert told <= calls
            rounds.setdefault(page.path, []).append(told / live.interval_s(calls, every_s))

        real(counted, calls=calls, every_s=every_s)

    tenant = platform.tenant("watched")
    opened = {"rollouts": {"tenant": "watched", "id": rollout_under_way(platform, tenant["id"])}}
    api = Api(platform.control_url, platform.session("admin"), transport=transport)
    session = api.session()
    assert session is not None
    found = 0
    for page in PAGES:
        module = __import__(page.render.__module__, fromlist=["live"])
        if not hasattr(module, "live"):
            continue
        found += 1
        monkeypatch.setattr(module, "live", watched)
        test = AppTest.from_function(
            _script,
            default_timeout=60,
            kwargs={"path": page.path, "api": api, "access": Access.of(session)},
        )
        for name, value in opened.get(page.path, {}).items():
            test.query_params[name] = value
        checked(test.run())
    transport.close()

    assert found >= 2
    # Of some pages only what is under way is live.
    assert {"overview", "fleet", "rollouts"} <= rounds.keys()
    for path, calls_per_s in rounds.items():
        assert sum(calls_per_s) <= 1.0, path


@pytest.mark.parametrize(
    ("calls", "every_s", "interval_s"), [(1, 3.0, 3.0), (2, 3.0, 3.0), (7, 3.0, 7.0), (1, 0.1, 1.0)]
)
def test_a_part_with_many_calls_runs_seldom(calls: int, every_s: float, interval_s: float) -> None:
    assert live.interval_s(calls, every_s) == interval_s


def _sentences():  # AppTest runs its text alone
    from loraplex_admin.components.sentences import sentences

    sentences([{"gate": "ttft", "in words": "p95 144 ms *against* 45 <b>ms</b>, tolerated x1.5"}])


def test_sentences_are_shown_in_whole_and_as_they_are() -> None:
    """In a table whose cells wrap, which reads Markdown: it is given none."""
    test = checked(AppTest.from_function(_sentences).run())

    [table] = test.table
    assert table.value["in words"][0] == (
        r"p95 144 ms \*against\* 45 \<b\>ms\<\/b\>\, tolerated x1\.5"
    )
    assert not test.dataframe
