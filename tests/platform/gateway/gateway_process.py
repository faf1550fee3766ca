"""The gateway as a process of its own, on a free port."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.platform.gateway import tiny_model
from tests.platform.gateway.stand import BASE, eventually
from tests.support.metering import PEPPER
from tests.support.postgres import serving_url

_RUN = """
import gc, sys
from pathlib import Path
from loraplex_platform.gateway.main import run
from loraplex_platform.settings import GatewaySettings
code = run(GatewaySettings(), port_file=Path(sys.argv[1]))
heavy = sorted({"torch", "transformers", "peft", "numpy.testing"} & set(sys.modules))
print("modules", heavy, flush=True)
print("heap", gc.get_freeze_count(), len(gc.get_objects()), flush=True)
sys.exit(code)
"""


@dataclass
class GatewayProcess:
    """One that serves."""

    url: str
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        return self.process.pid


@asynccontextmanager
async def gateway_process(
    db_url: str, redis_url: str, folder: Path, *, drain_grace_s: float = 5.0
) -> AsyncIterator[GatewayProcess]:
    """Started, with one engine in sight; killed at the end if the test has not ended it.

    Args:
        folder: its own.
    """
    port_file = folder / "port"
    environment = os.environ | {
        "LORAPLEX_DATABASE_URL": serving_url(db_url),
        "LORAPLEX_REDIS_URL": redis_url,
        "LORAPLEX_MODEL_DIR": str(tiny_model.write(folder / "model")),
        "LORAPLEX_BASE_MODEL": BASE,
        "LORAPLEX_KEY_PEPPER": PEPPER.get_secret_value(),
        "LORAPLEX_SALT_KEY": "salt-for-tests-0123456789abcdefghij",
        "LORAPLEX_GATEWAY_PORT": "0",
        "LORAPLEX_DRAIN_GRACE_S": str(drain_grace_s),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUN, str(port_file), env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        # A cold start on a busy machine takes its time.
        await eventually(port_file.exists, "the port file", deadline_s=120)
        url = f"http://127.0.0.1:{int(port_file.read_text())}"
        await eventually(lambda: _sees_an_engine(url), "an engine seen by the process")
        yield GatewayProcess(url, process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _sees_an_engine(url: str) -> bool:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/ready")
    return answer.status_code == 200 and answer.json()["engines_ready"] == 1
