"""Headless Chromium (Debian's, by Playwright) and the console as a process, for browser tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Error, Page, TimeoutError, expect, sync_playwright

from tests.support.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A page is ready within a second on a quiet machine; tests also run on busy ones.
DEADLINE_S = 60.0
_TRIES = 6


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Without one installed the test is skipped; in CI it fails instead."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        assert not os.environ.get("CI"), "CI needs chromium: make chromium"
        pytest.skip("needs chromium: make chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def console(control_url: str, folder: Path) -> Iterator[str]:
    """`loraplex console` on a free port; its URL. What it logs goes to folder/console.log."""
    command = ("-m", "loraplex_platform.cli", "console", "--port", "{port}")
    with _streamlit(command, folder, "console.log", LORAPLEX_CONTROL_URL=control_url) as url:
        yield url


@contextmanager
def script(path: Path, folder: Path) -> Iterator[str]:
    """A Streamlit script of the tests' own on a free port; its URL. What it logs goes to folder, under its name."""
    command = ("-m", "streamlit", "run", str(path), "--server.port", "{port}")
    command += ("--server.address", "127.0.0.1", "--server.headless", "true")
    command += ("--browser.gatherUsageStats", "false", "--server.fileWatcherType", "none")
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    with _streamlit(command, folder, f"{path.stem}.log", PYTHONPATH=paths) as url:
        yield url


@contextmanager
def _streamlit(
    command: tuple[str, ...], folder: Path, log_name: str, **environment: str
) -> Iterator[str]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    with (folder / log_name).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *(one.format(port=port) for one in command)],
            env={**inherited, **environment},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, (folder / log_name).read_text()
        try:
            return httpx.get(f"{url}/_stcore/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up, deadline_s=DEADLINE_S)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def open_page(browser: Browser, *, scheme: str = "light", width: int = 1280) -> Page:
    """A page of a visitor of their own."""
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": 1400},
        accept_downloads=True,
    )
    context.set_default_timeout(DEADLINE_S * 1000)
    return context.new_page()


@contextmanager
def told(page: Page) -> Iterator[None]:
    """Of an error in the block, what stood on the page then."""
    try:
        yield
    except Exception as error:
        with suppress(Error):
            error.add_note(f"{page.url}\n{page.get_by_test_id('stMain').inner_text()}")
        raise


def log_in(page: Page, url: str, email: str, password: str) -> None:
    """Open the console, and log in where that leads."""
    page.goto(url)
    page.get_by_label("E-mail").fill(email)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Overview").wait_for()


def settle(page: Page) -> None:
    """Wait until the script has run and nothing is still being drawn."""
    page.wait_for_function(
        """() => document.querySelector('[data-testid="stMain"] h1')
            && !document.querySelector('[data-test-script-state="running"]')
            && !document.querySelector('[data-testid="stSkeleton"]')
            && !document.querySelector('[data-stale="true"]')"""
    )


def visit(page: Page, url: str, path: str) -> None:
    """Open one of the console's pages and wait until it stands."""
    page.goto(f"{url}/{path}")
    settle(page)


def go(page: Page, title: str) -> None:
    """Follow the sidebar's link."""
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=title, exact=True).click()
    page.get_by_role("heading", name=title, exact=True).wait_for()
    settle(page)


def choose(page: Page, label: str, option: str) -> None:
    """Choose in a select box. A box that something drawn at that moment closes again is opened again."""
    settle(page)
    wanted = page.get_by_role("option", name=option, exact=True)
    for _ in range(_TRIES):
        page.get_by_role("combobox", name=label).first.click()
        with suppress(TimeoutError):
            wanted.click(timeout=DEADLINE_S * 1000 / _TRIES)
            break
    else:
        wanted.click()
    settle(page)


def give(page: Page, label: str, path: Path) -> None:
    """Give a file to an uploader and wait until the console has it: named there, and not on its way."""
    uploader = page.get_by_test_id("stFileUploader").filter(has_text=label)
    uploader.locator('input[type="file"]').set_input_files(path)
    uploader.get_by_title(path.name, exact=True).wait_for()
    expect(uploader.get_by_test_id("stFileChipIconSpinner")).to_have_count(
        0, timeout=DEADLINE_S * 1000
    )
    settle(page)


def write(page: Page, label: str, text: str) -> None:
    """Write into a field, and leave it, as the console hears of it only then."""
    box = page.get_by_label(label, exact=True).first
    box.fill(text)
    box.press("Tab")
    settle(page)


def press(page: Page, name: str) -> None:
    """Press a button, and wait for what that does."""
    page.get_by_role("button", name=name).first.click()
    settle(page)


def unfold(page: Page, title: str) -> None:
    """Open a part of the page that is folded away, if it is."""
    part = page.get_by_test_id("stExpander").filter(has_text=title).first
    if part.locator("details").first.get_attribute("open") is None:
        part.locator("summary").first.click()
        settle(page)


def confirm(page: Page, title: str, name: str, button: str) -> None:
    """Type a name where the console asks for it, and press."""
    unfold(page, title)
    part = page.get_by_test_id("stExpander").filter(has_text=title).first
    box = part.get_by_label("Type the name above to confirm")
    box.fill(name)
    box.press("Tab")  # the console hears of it now, not while the button is pressed
    settle(page)
    part.get_by_role("button", name=button).click()
    settle(page)
