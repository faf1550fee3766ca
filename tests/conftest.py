"""Fixtures for every test: a Postgres, a Redis, and folders short enough for unix sockets.

The libraries below torch get the settings that an engine gives them. SIGTERM is answered as Ctrl-C, so
that a run that is told to end leaves neither folders nor processes (a killed one: folders, which a later
run deletes).
Without an NVIDIA device Triton kernels run interpreted, in numpy. Triton reads that when it is first imported.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest
import structlog
from loraplex_engine.numerics_environment import prepare_numerics

from tests.support.distribution import GroupScheduling, order_of
from tests.support.folders import delete_leftovers, short_folder

if TYPE_CHECKING:
    from loraplex_platform.db.session import Database
    from xdist.remote import Producer

    from tests.support.postgres import PostgresServer
    from tests.support.screenshots import Pictures

prepare_numerics()
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What becomes of the browser tests' pictures; see tests/support/screenshots.py."""
    parser.addoption("--screenshots", type=Path, metavar="FOLDER", help="keep all pictures there")
    parser.addoption(
        "--doc-screenshots",
        action="store_true",
        help="renew the pictures in docs/screenshots (`make screenshots`)",
    )


def pytest_sessionstart() -> None:
    """Tidy up after whoever was killed before, and hear signals.

    A run begun by `nohup`, or in the background of a script, has them ignored, and all that it starts and
    tells to end would inherit that. Handlers are not inherited.
    """
    delete_leftovers()
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups that take longest go first."""
    items.sort(key=lambda item: order_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    """For `pytest -n --dist loadgroup`: a file or a folder that shares a set-up is the unit of work."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each time: code under test puts handlers of its own in this one's place."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end_as_by_ctrl_c)


def _end_as_by_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    # Once: a second one would interrupt the tidying up. (Not SIG_IGN, which children would inherit.)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """A folder with a short name: unix socket paths end at 107 bytes."""
    with short_folder() as folder:
        yield folder


@pytest.fixture
def short_tmp_path() -> Iterator[Path]:
    """Like `tmp_path`, but short enough for sockets in it."""
    with short_folder() as folder:
        yield folder


# The servers' modules are imported inside: tests of the engine alone need no database driver.


@pytest.fixture(scope="session")
def postgres_server(session_folder: Path) -> Iterator[PostgresServer]:
    """The session's server, to take databases from: `.borrow()`, `.clone()`, `.empty()`."""
    from tests.support.postgres import PostgresServer

    server = PostgresServer(session_folder / "postgres")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The owner's URL of a migrated database that all tests share: for reading, or by unique ids."""
    with postgres_server.clone() as url:
        yield url


@pytest.fixture
def db_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The owner's URL of a migrated, empty database, for this test alone. Leave its schema as it is
    (else take `postgres_server.clone()`)."""
    with postgres_server.borrow() as url:
        yield url


@pytest.fixture
async def db(db_url: str) -> AsyncIterator[Database]:
    """A fresh database (loraplex_platform.db.session.Database) as serving processes see it."""
    from loraplex_platform.db.session import open_database

    from tests.support.postgres import database_settings, serving_url

    async with open_database(database_settings(serving_url(db_url))) as database:
        yield database


@pytest.fixture(scope="session")
def _redis_server_url(session_folder: Path) -> Iterator[str]:
    from loraplex_platform.local.embedded import start_redis

    server = start_redis(session_folder / "redis")
    yield server.url
    server.stop()


@pytest.fixture
def redis_url(_redis_server_url: str) -> str:
    """The URL of an empty Redis on a unix socket."""
    import redis

    client = redis.Redis.from_url(_redis_server_url)
    client.flushall()
    client.close()
    return _redis_server_url


@pytest.fixture(scope="session")
def pictures(pytestconfig: pytest.Config) -> Pictures:
    """Takes the pictures of browser tests: `.take(page, name)`."""
    from tests.support.screenshots import Pictures

    return Pictures(
        pytestconfig.getoption("--screenshots"),
        is_for_docs=pytestconfig.getoption("--doc-screenshots"),
    )


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """Whoever sets logging up in this process writes to a stream that ends with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
