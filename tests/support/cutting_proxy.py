"""A TCP proxy that cuts connections after so many bytes: the network between a client and a server.

with CuttingProxy(port, cuts=[1000, 0, 70_000]) as proxy:    # then it cuts no more
    ... f"http://127.0.0.1:{proxy.port}"
    proxy.cut_now()    # all that are open
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Self


class CuttingProxy:
    """See the module's header. Cut are bytes on their way to the server, of one connection after another."""

    def __init__(self, port: int, cuts: Sequence[int]) -> None:
        self.target = port
        self._cuts = list(cuts)
        self.num_cuts = 0
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def cut_now(self) -> None:
        """Cut every connection that is open; new ones go to `target`, whatever that is by now."""
        for end in list(self._open):
            # Threads that still read hold a socket open that is only closed.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.num_cuts += 1

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        left = self._cuts.pop(0) if self._cuts else None
        with (
            client,
            contextlib.ExitStack() as stack,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target)) as server,
        ):
            self._open |= {client, server}
            stack.callback(self._open.difference_update, {client, server})
            back = threading.Thread(target=self._back, args=(server, client), daemon=True)
            back.start()
            while piece := client.recv(65536):
                if left is not None and len(piece) >= left:
                    server.sendall(piece[:left])
                    self.num_cuts += 1
                    # Threads that still read hold a socket open that is only closed.
                    for end in (server, client):
                        end.shutdown(socket.SHUT_RDWR)
                    return
                left = None if left is None else left - len(piece)
                server.sendall(piece)

    @staticmethod
    def _back(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := server.recv(65536):
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
