"""Who may read, who may use, and where sockets go."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from loraplex_platform.local import credentials
from loraplex_platform.local.data_dir import DataDir, read_json, write_private
from loraplex_platform.local.errors import DataDirInUseError, SettingError

HOLDER = """
import sys, signal
from pathlib import Path
from loraplex_platform.local.data_dir import DataDir
with DataDir.create(Path(sys.argv[1])).lock():
    print("held", flush=True)
    signal.pause()
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_it_is_its_owners_alone(tmp_path: Path) -> None:
    data_dir = DataDir.create(tmp_path / "a" / "data")

    assert {mode(path) for path in (data_dir.root, data_dir.logs, data_dir.run, data_dir.pids)} == {
        0o700
    }


def test_an_open_folder_is_closed_but_passing_through_may_stay(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir(mode=0o755)
    root.chmod(0o755)

    DataDir.create(root)

    # 0711: what the embedded Postgres needs when it runs as another user; nobody can list it.
    assert mode(root) == 0o711


def test_a_second_fleet_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "data")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    with (
        pytest.raises(DataDirInUseError, match=f"pid {holder.pid}"),
        DataDir.create(tmp_path / "data").lock(),
    ):
        pass

    # However it ends, the lock goes with it.
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with DataDir.create(tmp_path / "data").lock():
        assert (tmp_path / "data" / "lock").read_text() == f"{os.getpid()}\n"


def test_a_private_file_is_replaced_whole_and_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.write_text("{}")
    path.chmod(0o644)

    write_private(path, {"pid": 1})

    assert mode(path) == 0o600
    assert read_json(path) == {"pid": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["demo.json"]


def test_a_damaged_file_is_an_error_and_an_absent_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")

    with pytest.raises(SettingError, match="restore it or remove it"):
        read_json(tmp_path / "x.json")
    assert read_json(tmp_path / "y.json") is None


def test_sockets_lie_in_run_when_the_path_is_short(short_tmp_path: Path) -> None:
    data_dir = DataDir.create(short_tmp_path)

    assert data_dir.socket_dir() == data_dir.run


def test_sockets_of_a_deep_data_directory_go_to_a_short_private_folder(
    tmp_path: Path, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp_path))
    deep = DataDir.create(tmp_path / ("d" * 60) / ("e" * 60))

    folder = deep.socket_dir()

    assert folder.parent == short_tmp_path
    assert mode(folder) == 0o700
    assert deep.socket_dir() == folder
    assert DataDir.create(tmp_path / ("d" * 60) / ("f" * 60)).socket_dir() != folder


def test_a_short_folder_that_others_can_enter_is_refused(
    tmp_path: Path, short_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp_path))
    deep = DataDir.create(tmp_path / ("d" * 60) / ("e" * 60))
    deep.socket_dir().chmod(0o777)

    with pytest.raises(SettingError, match="not a folder of ours alone"):
        deep.socket_dir()


def test_a_data_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingError, match="--data-dir"):
        DataDir.create(tmp_path / "file" / "data")


# ---------------------------------------------------------------------------- secrets


def test_secrets_are_made_once_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"

    first = credentials.load_or_make(path)
    second = credentials.load_or_make(path)

    assert first == second
    assert mode(path) == 0o600
    assert len(set(json.loads(path.read_text()).values())) == 7
    assert first.admin_key.startswith("lpx_ak_")
    secret_values = (
        *(first.key_pepper, first.salt_key, first.session_key),
        *(first.admin_key, first.serve_password),
    )
    for secret in secret_values:
        assert len(secret) >= 32
        assert secret not in repr(first)


def test_secrets_that_others_may_read_stop_the_start(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    credentials.load_or_make(path)
    path.chmod(0o640)

    with pytest.raises(SettingError, match="chmod 600"):
        credentials.load_or_make(path)


def test_a_lost_pepper_is_an_error_not_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    credentials.load_or_make(path)
    content = json.loads(path.read_text())
    del content["key_pepper"]
    write_private(path, content)

    with pytest.raises(SettingError, match="lacks key_pepper"):
        credentials.load_or_make(path)


def test_a_missing_database_login_is_made_anew_once(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    first = credentials.load_or_make(path)
    content = json.loads(path.read_text())
    del content["serve_role"], content["serve_password"]
    write_private(path, content)

    second, third = credentials.load_or_make(path), credentials.load_or_make(path)

    assert second == third
    assert second.serve_role != first.serve_role
    assert second.key_pepper == first.key_pepper
    assert mode(path) == 0o600
