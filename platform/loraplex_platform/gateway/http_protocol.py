"""uvicorn's HTTP protocol with a bound on headers and our shape for what is not HTTP at all.

The parser under httptools keeps whatever it is fed; without a bound a client can grow one header
for as long as it likes (CVE-2025-48956 was that, in another server).
"""

from __future__ import annotations

import uuid

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loraplex_platform.errors import InvalidRequestError
from loraplex_platform.gateway.errors import envelope
from loraplex_platform.ids import uuid7

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128


class HeadersTooLargeError(InvalidRequestError):
    """Request line and headers together are over the bound."""

    status, code = 431, "headers_too_large"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Counts the bytes between the start of a message and the end of its headers."""

    _num_header_bytes = 0
    _is_in_headers = True  # until the headers of the current message are complete

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the headers have outgrown their bound."""
        if self._is_in_headers:
            self._num_header_bytes += len(data)
            too_long = self._num_header_bytes - len(data) > MAX_HEADER_BYTES
            # One read may hold the end of the headers and much of a body: what counts is how many
            # bytes had come before it without an end.
            if too_long:
                self._refuse(HeadersTooLargeError("The headers are too large."))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A new message: its headers are still to come."""
        super().on_message_begin()
        self._is_in_headers = True

    def on_headers_complete(self) -> None:
        """The headers are in; what follows is the body."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLargeError("The headers are too large."))
            return
        self._is_in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next bytes are the next message's."""
        if self.cycle is not None:
            super().on_message_complete()
        self._is_in_headers = True
        self._num_header_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Body bytes; of a refused message they are dropped."""
        if not self._is_in_headers:
            super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Not HTTP: say so in OpenAI's envelope."""
        self._refuse(InvalidRequestError(msg, code="invalid_http"))

    def _refuse(self, error: InvalidRequestError) -> None:
        if self.transport.is_closing():
            return
        request_uuid: uuid.UUID = uuid7()
        request_id = f"req_{request_uuid.hex}"
        body = envelope(error, request_id)
        head = (
            f"HTTP/1.1 {error.status} {'Bad Request' if error.status == 400 else 'Refused'}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
