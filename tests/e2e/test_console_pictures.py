"""Every page of the console as the docs show it, on the real product: bright, dark and as narrow as a phone, of a tenant
that has something on each, with a long name and people who write from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loraplex_admin.catalog import PAGES
from playwright.sync_api import Browser

from tests.admin_ui import full_tenant
from tests.admin_ui.full_tenant import Words
from tests.admin_ui.stand import Platform
from tests.admin_ui.visitor import address, enter, width_beyond
from tests.platform.control.stand import AdapterFiles
from tests.support import browser
from tests.support.fleet import Fleet
from tests.support.screenshots import Pictures, name_of

pytestmark = [pytest.mark.browser, pytest.mark.model, pytest.mark.slow]

ADAPTERS = Path(__file__).resolve().parents[2] / "examples" / "adapters"
WIDTHS = {"light": 1280, "dark": 1280, "narrow": 400}
NAME = "Nordhavn Forsikring og Pension, kundeservice (customer support, Copenhagen)"
CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
}
CAPITALS |= {"Norway": "Oslo", "Egypt": "Cairo", "Chile": "Santiago"}
KEYS = (
    "production",
    "trial: no request a day",
    "خدمة العملاء",
    "תמיכה בלקוחות (support)",
    "nightly evaluation of the newest adapter, on the staging cluster",
    "υποστήριξη πελατών",
)


@pytest.fixture(scope="module")
def platform(demo_fleet: Fleet) -> Iterator[Platform]:
    headers = {"authorization": f"Bearer {demo_fleet.admin_key}"}
    url = demo_fleet.state["control_url"]
    with httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False) as client:
        made = Platform(control_url=url, gateway_url=demo_fleet.gateway_url, http=client)
        yield made
        for api in made.apis:
            api.close()


@pytest.fixture(scope="module")
def console_url(platform: Platform, session_folder: Path) -> Iterator[str]:
    with browser.console(platform.control_url, session_folder) as url:
        yield url


@pytest.fixture(scope="module")
def tenant(platform: Platform) -> dict[str, Any]:
    """Its adapter's two versions are two of the examples; it asks for capitals."""
    one, other = (
        AdapterFiles(
            *(
                (ADAPTERS / name / file).read_bytes()
                for file in ("adapter_config.json", "adapter_model.safetensors")
            )
        )
        for name in ("pirate", "capitals")
    )
    questions = tuple(f"What is the capital of {country}?" for country in (*CAPITALS,) * 3)
    words = Words(
        keys=KEYS,
        project="مشروع الدردشة",
        hook="https://hooks.example.com/loraplex",
        legal_name="Nordhavn Forsikring og Pension A/S",
        address="Kajen 12\n2150 Nordhavn\nDenmark",
        reason="Goodwill for the outage of the week before",
        zone="Europe/Copenhagen",
        adapters=(one, other),
        base="smollm2-135m",
        questions=questions,
        cases=tuple(
            (f"capital-of-{name.lower()}", f"What is the capital of {name}?", capital)
            for name, capital in CAPITALS.items()
        ),
        evaluated="capitals",
    )
    made = full_tenant.fill(platform, "nordhavn", NAME, words)
    made["opened"]["usage"] = {"usage_range": "Last hour"}
    return made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser.chromium() as found:
        yield found


@pytest.mark.parametrize("look", WIDTHS)
@pytest.mark.timeout(600)  # the demo starts within it
def test_every_page_of_a_tenant_that_has_something_on_each(
    look: str,
    platform: Platform,
    tenant: dict[str, Any],
    chromium: Browser,
    console_url: str,
    pictures: Pictures,
) -> None:
    scheme = "dark" if look == "dark" else "light"
    page, trouble = enter(chromium, console_url, platform.api(), scheme=scheme, width=WIDTHS[look])
    for one in PAGES:
        with browser.told(page):
            browser.visit(page, console_url, address(one.path, tenant))
            # What these are for comes only by a button.
            if one.path == "playground":
                browser.press(page, "Ask")
                page.get_by_text(re.compile(r"\d tokens")).nth(1).wait_for()
            elif one.path == "invariants":
                browser.press(page, "Check now")
            assert not page.get_by_test_id("stException").count()
            assert width_beyond(page) <= 0
            pictures.take(page, name_of(look, one.path))
    assert trouble == []
    page.context.close()
