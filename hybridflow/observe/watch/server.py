"""The server of `hybridflow watch`: it listens on loopback and accepts only addresses that contain
the token.

It reads only the run folder, and contacts none of the run's processes.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.observe.watch.pages import Page, Pages

_HOST = "127.0.0.1"
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
_PATIENCE_S = 10.0  # for a connection that sends nothing
_EVERY_S = 0.5  # between two looks at the folder
_MOST_CONNECTIONS = 64
_MOST_FIELDS = 50
_CLOSED = "Open the address printed by hybridflow watch, which contains a token."
_log = logging.getLogger(__name__)


class WatchServer:
    """Serves `pages` at `address`, and keeps them up to date in a thread.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(self, pages: Pages, port: int) -> None:
        self.pages = pages
        self._token = secrets.token_urlsafe(32)
        self._ended = threading.Event()
        try:
            self._server = _Server(_handler(pages, self._token), port)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {_HOST}:{port} cannot be used ({error.strerror}); choose another "
                "port, or 0 for any free one"
            ) from error
        self.address = f"http://{_HOST}:{self._server.server_port}/{self._token}/"
        self._reader = threading.Thread(target=self._read, name="run folder", daemon=True)

    def serve(self) -> None:
        """Serve until `close` or an interrupt."""
        self._reader.start()
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _read(self) -> None:
        pages = self.pages
        while not self._ended.wait(_EVERY_S):
            try:
                for one in filter(None, (pages.watched, pages.other)):
                    one.live.poll()
                    for _ in one.index.refresh():
                        pages.live.poll()  # a first reading of all dumps may take long
                        if self._ended.is_set():
                            return
            except (OSError, HybridFlowError, MemoryError) as error:
                pages.failure = f"the folder cannot be read: {type(error).__name__}: {error}"
            except Exception as error:  # a page that stands still must say so
                _log.exception("the run folder could not be read")
                pages.failure = f"the folder cannot be read: {type(error).__name__}"
            else:
                pages.failure = ""


class _Server(ThreadingHTTPServer):
    """A server with a limited number of connections. Further connections are closed."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int) -> None:
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__((_HOST, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because the browser closed the connection."""


def _headers(page: Page) -> dict[str, str]:
    script = f"'nonce-{page.nonce}'" if page.nonce else "'none'"
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src {script}; "
            "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
            "frame-ancestors 'none'"
        ),
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _handler(pages: Pages, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _PATIENCE_S

        def do_GET(self) -> None:
            """Answer a page."""
            # a page in a browser must not read it through a name that points here
            if not _LOCAL.fullmatch(self.headers.get("Host", "")):
                return self._send(Page(403, "text/plain", _CLOSED))
            address = urlsplit(self.path)
            given, slash, name = address.path.removeprefix("/").partition("/")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
                return self._send(Page(403, "text/plain", _CLOSED))
            if not slash:
                return self._send(Page(404, "text/plain", "The address ends with a slash."))
            try:
                fields = dict(parse_qsl(address.query, True, max_num_fields=_MOST_FIELDS))
                page = pages.page(name, fields)
            except ValueError as error:
                page = Page(400, "text/plain", f"The address cannot be used: {error}")
            except MemoryError:
                page = Page(503, "text/plain", "Out of memory: narrow the search.")
            return self._send(page)

        def _send(self, page: Page) -> None:
            data = page.text.encode("utf-8", "backslashreplace")
            self.send_response(page.status)
            self.send_header("Content-Type", f"{page.kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            for name, value in _headers(page).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing, because addresses contain the token."""

    return Handler
