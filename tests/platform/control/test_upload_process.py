"""Uploads against real control processes: cut networks, kill -9, two processes, a hundred megabytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from loraplex_platform.admin_client import AdminApiError, AdminClient
from loraplex_platform.resumable_upload import ResumableUpload

from tests.platform.control.stand import ADMIN_KEY, AdapterFiles, adapter, write_model
from tests.platform.control.test_process import MODULE, environment
from tests.support.adapter_files import encode_tensors
from tests.support.cutting_proxy import CuttingProxy

MB = 1 << 20


class Controls:
    """Control processes that share a database and a store."""

    def __init__(self, db_url: str, redis_url: str, folder: Path) -> None:
        write_model(folder / "model")
        self.folder = folder
        self._environment = environment(db_url, redis_url, folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **changes: str) -> int:
        """A new one; its port."""
        port_file = self.folder / f"control-{len(self.processes)}.port"
        log = (self.folder / f"control-{len(self.processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, f"--port-file={port_file}"],
                env=self._environment | changes,
                stderr=log,
            )
        self.processes.append(process)
        give_up_s = time.monotonic() + 90
        while not port_file.exists():
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        return int(port_file.read_text())

    def kill(self, index: int = -1) -> None:
        self.processes[index].send_signal(signal.SIGKILL)
        self.processes[index].wait()


@pytest.fixture
def controls(db_url: str, redis_url: str, short_tmp_path: Path) -> Iterator[Controls]:
    opened = Controls(db_url, redis_url, short_tmp_path)
    yield opened
    for process in opened.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def client(port: int) -> AdminClient:
    return AdminClient(f"http://127.0.0.1:{port}", ADMIN_KEY)


def write(folder: Path, files: AdapterFiles) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(files.config)
    (folder / "adapter_model.safetensors").write_bytes(files.model)
    return folder


@pytest.mark.slow
def test_over_a_network_that_cuts_anywhere_it_arrives(
    controls: Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex_platform.resumable_upload.PIECE_BYTES", 20_000)
    folder = write(tmp_path / "a", adapter(rank=16))
    size = (folder / "adapter_model.safetensors").stat().st_size
    port = controls.start()
    order = random.Random(3)
    with client(port) as admin:
        tenant_id = admin.create_tenant("acme", "Acme")["id"]
        began = admin.begin_upload(tenant_id, _plan(folder, "warm"))
        assert began["state"] == "open"
    cuts = [order.randrange(size // 2) for _ in range(12)]
    seen: list[int] = []

    with CuttingProxy(port, cuts) as proxy, client(proxy.port) as admin:
        upload = ResumableUpload(
            admin,
            tenant_id,
            "capitals",
            folder,
            is_probed=False,
            on_progress=lambda sent, total: seen.append(sent),
            wait=lambda wait_s: time.sleep(min(wait_s, 1.0)),
            states=tmp_path / "states",
        )
        made = _persist(upload.run)

    assert made["version"]["status"] == "ready"
    assert proxy.num_cuts >= 8
    assert seen[-1] == size + (folder / "adapter_config.json").stat().st_size
    assert list((tmp_path / "states").iterdir()) == [], "nothing is left to go on with"


def _plan(folder: Path, name: str) -> dict[str, object]:
    files = [
        {"name": path.name, "size_bytes": path.stat().st_size} for path in sorted(folder.iterdir())
    ]
    return {"name": name, "files": files, "probe": False}


def _persist(run: Callable[[], dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """What somebody does whose first requests did not get through: the same again."""
    for _ in range(20):
        try:
            return run()
        except AdminApiError as error:
            if error.status is not None:
                raise
    raise AssertionError("it never got through")


def test_kill_9_loses_no_byte_that_was_there_and_another_process_goes_on(
    controls: Controls, tmp_path: Path
) -> None:
    folder = write(tmp_path / "a", adapter(rank=16))
    model = (folder / "adapter_model.safetensors").read_bytes()
    port = controls.start()
    other = controls.start()
    with client(port) as admin:
        tenant_id = admin.create_tenant("acme", "Acme")["id"]
        upload_id = admin.begin_upload(tenant_id, _plan(folder, "capitals"))["id"]
        config = (folder / "adapter_config.json").read_bytes()
        admin.append_bytes(tenant_id, upload_id, "adapter_config.json", 0, iter([config]))
        half = len(model) // 2
        is_sent = threading.Event()

        def slow() -> Iterator[bytes]:
            yield model[:half]
            is_sent.set()
            time.sleep(60)

        def send() -> None:
            with pytest.raises(AdminApiError):
                admin.append_bytes(tenant_id, upload_id, "adapter_model.safetensors", 0, slow())

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        assert is_sent.wait(30)
        with client(other) as second:
            with pytest.raises(AdminApiError) as busy:
                second.append_bytes(
                    tenant_id, upload_id, "adapter_model.safetensors", 0, iter([model])
                )
            controls.kill(0)
            at = second.upload_offset(tenant_id, upload_id, "adapter_model.safetensors")
            rest = iter([model[at:]])
            second.append_bytes(tenant_id, upload_id, "adapter_model.safetensors", at, rest)
            controls.kill(1)
    assert busy.value.code in ("upload_busy", "wrong_offset")
    assert 0 <= at <= half

    with client(controls.start()) as third:
        assert third.complete_upload(tenant_id, upload_id)["version"]["status"] == "ready"


@pytest.mark.slow
def test_a_hundred_megabytes_arrive_in_20_s_while_the_process_grows_by_less_than_50_mb(
    controls: Controls, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "a", big_adapter(controls.folder / "model", 100 * MB))
    port = controls.start()
    process = psutil.Process(controls.processes[-1].pid)
    with client(port) as admin:
        tenant_id = admin.create_tenant("acme", "Acme")["id"]
        small = write(tmp_path / "small", big_adapter(controls.folder / "model", MB, seed=1))
        run = {"is_probed": False, "states": tmp_path / "states"}
        ResumableUpload(admin, tenant_id, "small", small, **run).run()  # type: ignore[arg-type]
        before = process.memory_info().rss
        highest = [before]
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.02):
                highest[0] = max(highest[0], process.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        began_s = time.monotonic()
        made = ResumableUpload(admin, tenant_id, "large", folder, **run).run()  # type: ignore[arg-type]
        took_s = time.monotonic() - began_s
        is_over.set()
        watching.join()

    grown = highest[0] - before
    with capsys.disabled():
        figures = {"s": round(took_s, 1), "grown_mb": round(grown / 1e6, 1)}
        print(json.dumps(figures), os.getloadavg())  # the figure is the point
    assert made["version"]["size_bytes"] >= 100e6
    assert took_s < 20
    assert grown < 50e6


def big_adapter(model: Path, size_bytes: int, seed: int = 0) -> AdapterFiles:
    """A sound adapter of about this size for a model that is made wide enough for it."""
    config_path = model / "config.json"
    config = json.loads(config_path.read_text())
    layers, hidden = 17, 2048
    config |= {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": hidden // 16,
    }
    config_path.write_text(json.dumps(config))
    names = [
        f"base_model.model.model.layers.{layer}.{linear}"
        for layer in range(layers)
        for linear in (*(f"self_attn.{p}_proj" for p in "qkvo"), "mlp.gate_proj", "mlp.down_proj")
    ]
    rank = max(1, min(64, size_bytes // (len(names) * hidden * 2 * 4)))
    order = np.random.default_rng(seed)
    tensors = {}
    for name in names:
        a, b = order.standard_normal((2, rank, hidden), dtype=np.float32) * 0.02
        tensors[f"{name}.lora_A.weight"] = a
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
    text = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    return AdapterFiles(json.dumps(text).encode(), encode_tensors(tensors))
