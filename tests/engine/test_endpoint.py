"""The engine's sockets are closed by default, and the replica's record says where they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from loraplex_engine.block_events import TOPIC, decode_batch
from loraplex_engine.client import CurveKeys, EngineClient, EngineLostError
from loraplex_engine.curve import AllowList, load_key_pair, make_key_pair
from loraplex_engine.errors import ConfigError
from loraplex_engine.protocol import PROTOCOL_VERSION, Hello, ReplicaRecord, encode

from tests.support.replicas import (
    DEADLINE_S,
    Replica,
    make_request,
    make_server,
    read_all,
    run_replica,
)


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    (folder / "open").mkdir(mode=0o755)

    with pytest.raises(ConfigError, match="chmod 700"):
        make_server(folder, f"ipc://{folder}/open/e.sock")


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("ipc:///tmp/" + "x" * 120 + "/e.sock", "shorter"),
        ("ipc://relative.sock", "absolute"),
        ("tcp://127.0.0.1:0", "CURVE|--curve"),
        ("inproc://x", "ipc:///path or tcp"),
        ("tcp", "ipc:///path or tcp"),
    ],
)
def test_bad_addresses_are_refused_with_a_remedy(folder: Path, address: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_server(folder, address)


async def test_a_second_engine_cannot_take_the_address_or_the_journal(
    replica: Replica, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="journal"):
        make_server(folder, f"ipc://{folder}/other.sock")
    (folder / "second").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="another engine listens"):
        make_server(folder / "second", replica.address)


async def test_tcp_admits_only_listed_keys(folder: Path) -> None:
    server = make_key_pair(folder / "server.key")
    friend = make_key_pair(folder / "friend.key")
    stranger = make_key_pair(folder / "stranger.key")
    assert load_key_pair(folder / "friend.key") == friend
    allowed = folder / "allowed"
    allowed.write_text(f"# gateways\n{friend.public_key.decode()} gw-1\n\n#\n")
    async with run_replica(
        folder,
        address="tcp://127.0.0.1:0",
        curve_secret_key_file=folder / "server.key",
        curve_allowed_keys_file=allowed,
    ) as replica:
        keys = CurveKeys(server.public_key, friend.public_key, friend.secret_key)
        async with EngineClient(replica.address, gateway_id="friend", curve=keys) as client:
            await client.connect()
            await read_all(await client.generate(make_request()))
        keys = CurveKeys(server.public_key, stranger.public_key, stranger.secret_key)
        async with EngineClient(replica.address, gateway_id="stranger", curve=keys) as client:
            with pytest.raises(EngineLostError):
                await client.connect(timeout_s=0.5)
        context = zmq.asyncio.Context()
        plain = context.socket(zmq.DEALER)
        plain.connect(replica.address)
        await plain.send(encode(Hello(protocol_version=PROTOCOL_VERSION, gateway_id="plain")))
        assert await plain.poll(300) == 0
        plain.close(linger=0)
        context.term()


async def test_the_record_says_where_block_events_are_published(folder: Path) -> None:
    """A router that reads the registry can subscribe, knowing nothing else; also where TCP is mixed in."""
    keys = make_key_pair(folder / "server.key")
    (folder / "allowed").write_text(f"{keys.public_key.decode()} router\n")
    curve = {
        "curve_secret_key_file": folder / "server.key",
        "curve_allowed_keys_file": folder / "allowed",
    }

    async with run_replica(folder, events_address="tcp://127.0.0.1:0", **curve) as replica:
        record = replica.server._describe()
        assert record is not None
        assert (record.address, record.curve_public_key) == (replica.address, None)
        assert record.events_address == replica.server.events_address
        assert record.events_curve_public_key == keys.public_key.decode()
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.curve_serverkey = record.events_curve_public_key.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.public_key, keys.secret_key
            socket.subscribe(TOPIC)
            socket.connect(record.events_address)
            assert await asyncio.to_thread(socket.poll, int(DEADLINE_S) * 1000)
            assert decode_batch(socket.recv_multipart()[1]).replica_id == record.replica_id
        assert msgspec.json.decode(msgspec.json.encode(record), type=ReplicaRecord) == record

    (folder / "plain").mkdir(mode=0o700)
    async with run_replica(
        folder / "plain",
        events_address=f"ipc://{folder}/plain/events.sock",
        advertise_events_address="ipc:///shared/events.sock",
    ) as replica:
        record = replica.server._describe()
        assert record is not None
        assert record.events_address == "ipc:///shared/events.sock"
        assert record.events_curve_public_key is None


async def test_without_block_events_the_record_has_no_address_for_them(
    replica: Replica, folder: Path
) -> None:
    record = replica.server._describe()
    assert record is not None
    assert (record.events_address, record.events_curve_public_key) == (None, None)

    (folder / "second").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="add --events-address"):
        make_server(
            folder / "second",
            f"ipc://{folder}/second/e.sock",
            advertise_events_address="tcp://router:1",
        )


def test_keys_in_the_allow_list_may_hold_the_comment_sign(folder: Path) -> None:
    path = folder / "allowed"
    keys = [b"#" + b"a" * 39, b"b" * 20 + b"#" + b"b" * 19]
    path.write_bytes(b"# ours\n" + keys[0] + b" gw-1 # the first\n" + keys[1] + b"\n")

    allow_list = AllowList(path)

    assert all(allow_list.callback("", key) for key in keys)
    assert not allow_list.callback("", b"c" * 40)
    path.write_bytes(keys[1])  # read again: the first is shut out
    assert [allow_list.callback("", key) for key in keys] == [False, True]
    path.unlink()
    assert not allow_list.callback("", keys[1])
    path.write_text("#forgot the space\n")
    with pytest.raises(ConfigError, match="does not start with"):
        AllowList(path)


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    path = folder / "server.key"
    make_key_pair(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_pair(path)

    path.chmod(0o600)
    path.write_text("not a key")
    with pytest.raises(ConfigError, match="Z85 secret key"):
        load_key_pair(path)
    with pytest.raises(FileExistsError):  # never overwritten
        make_key_pair(path)
