"""An S3 server in a process of its own (moto's server mode), with a bucket and credentials for it.

with s3_server() as s3:
    AdapterStore(f"s3://{s3.bucket}/store")      # the environment names the server
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import httpx

_CODE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(slots=True)
class S3Server:
    """The server and how it is reached."""

    process: subprocess.Popen[str]
    port: int
    bucket: str

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def stop(self) -> None:
        """It is away, from one moment to the next."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def s3_server(bucket: str = "adapters") -> Iterator[S3Server]:
    """The server, and this process's environment changed so that fsspec finds it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        server = S3Server(process, int(process.stdout.readline()), bucket)
        give_up_s = time.monotonic() + 30
        while True:
            try:
                made = httpx.put(f"http://127.0.0.1:{server.port}/{bucket}", trust_env=False)
                break
            except httpx.TransportError:
                assert time.monotonic() < give_up_s
                time.sleep(0.05)
        assert made.status_code == 200, made.text
        with mock.patch.dict(os.environ, server.environment):
            yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
