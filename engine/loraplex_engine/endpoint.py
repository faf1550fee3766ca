"""The engine's listening sockets, closed by default: a private unix socket, or TCP with CURVE.

* `ipc:///dir/name`: the folder must be ours and 0700 (it is made so when missing), and a lock beside
  the socket keeps a second engine from taking the address over, which ZeroMQ would let it.
* `tcp://host:port`: only with our secret key and an allow-list of gateways' public keys.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import ClassVar, Protocol

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from loraplex_engine.curve import AllowList, load_key_pair
from loraplex_engine.errors import ConfigError

log = structlog.get_logger(__name__)

MAX_IPC_PATH_BYTES = 107
MAX_FRAME_BYTES = 4 * 1024**2  # a prompt of 800,000 tokens; longer: disconnected
SEND_QUEUE_FRAMES = 64  # per gateway; more of them wait where their bytes are counted
SEND_QUEUE_BATCHES = 1000  # of events, per subscriber; one that is further behind misses some
MAX_SUBSCRIPTION_BYTES = 4096  # CURVE's handshake has to pass as well
FAREWELL_MS = 1000  # how long closing may wait to hand over the last frames
_ZAP_DOMAIN = b"loraplex"


class _Authenticator(Protocol):
    def stop(self) -> None: ...


class ProtectedSocket:
    """A bound socket with its context. Made on one thread, then used and closed by one other.

    `address` is where it listens, a TCP port of 0 resolved; `public_key` (Z85) is set on TCP.

    Raises:
        ConfigError: see the module's header; or the address is in use.
    """

    kind: ClassVar[int]  # ZeroMQ's socket type
    flag: ClassVar[str]  # the setting that the address comes from, for messages

    def __init__(
        self,
        address: str,
        *,
        curve_secret_key_file: Path | None = None,
        curve_allowed_keys_file: Path | None = None,
    ) -> None:
        self.public_key: str | None = None
        self._lock_fd: int | None = None
        self._authenticator: _Authenticator | None = None
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(self.kind)
        try:
            self.socket.linger = FAREWELL_MS
            self.socket.maxmsgsize = MAX_FRAME_BYTES
            self.socket.sndhwm = SEND_QUEUE_FRAMES
            self._set_up()
            if address.startswith("ipc://"):
                self._lock_fd = _claim_ipc_path(address, self.flag)
            elif address.startswith("tcp://"):
                self._require_curve(curve_secret_key_file, curve_allowed_keys_file)
            else:
                raise ConfigError(f"{self.flag} {address}: use ipc:///path or tcp://host:port")
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{self.flag} {address}: cannot listen there ({error})") from error
        except ConfigError:
            self.close()
            raise
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _set_up(self) -> None:
        """Options of the kind, before it is bound."""

    def close(self) -> None:
        """Hand over what is queued, for at most a second, and stop listening."""
        self.socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._context.term()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _require_curve(self, secret_file: Path | None, allowed_file: Path | None) -> None:
        if secret_file is None or allowed_file is None:
            raise ConfigError(
                "TCP needs --curve-secret-key-file and --curve-allowed-keys-file (make keys with"
                " python -m loraplex_engine.curve); on one machine use ipc:///path"
            )
        keys = load_key_pair(secret_file)
        allow_list = AllowList(allowed_file)
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        self._authenticator = authenticator
        authenticator.configure_curve_callback(
            domain=_ZAP_DOMAIN.decode(), credentials_provider=allow_list
        )
        self.socket.zap_domain = _ZAP_DOMAIN
        self.socket.curve_server = True
        self.socket.curve_publickey = keys.public_key
        self.socket.curve_secretkey = keys.secret_key
        self.public_key = keys.public_key.decode()


class Endpoint(ProtectedSocket):
    """Where gateways send requests: a ROUTER."""

    kind = zmq.ROUTER
    flag = "--address"

    @property
    def router(self) -> zmq.Socket[bytes]:
        return self.socket

    def _set_up(self) -> None:
        # A frame that cannot be delivered is an error, never dropped in silence.
        self.socket.router_mandatory = True


class EventsEndpoint(ProtectedSocket):
    """Where block events are published: a PUB that is told of subscriptions.

    Names of cached blocks tell a stranger little, but when they come and go is traffic analysis of
    every tenant: so it is as closed as the other.
    """

    kind = zmq.XPUB
    flag = "--events-address"

    def _set_up(self) -> None:
        self.socket.maxmsgsize = MAX_SUBSCRIPTION_BYTES
        self.socket.sndhwm = SEND_QUEUE_BATCHES
        self.socket.xpub_verbose = True  # a second subscription is how one asks for a snapshot


def _claim_ipc_path(address: str, flag: str) -> int:
    """Check or make the folder and take the lock; returns the lock's descriptor."""
    path = Path(address.removeprefix("ipc://"))
    if not path.is_absolute():
        raise ConfigError(f"{flag} {address}: give an absolute path, ipc:///dir/engine.sock")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"{flag} {address}: the path is {len(os.fsencode(path))} bytes long and unix"
            f" sockets allow {MAX_IPC_PATH_BYTES}; use a shorter folder"
        )
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = folder.stat()
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
            raise ConfigError(
                f"{flag} {address}: {folder} must belong to this user and be closed to others"
                f" (chmod 700); whoever reaches the socket can run requests as any tenant"
            )
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{flag} {address}: {error}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise ConfigError(
            f"{flag} {address}: another engine listens there; stop it or use another path"
        ) from None
    return lock_fd
