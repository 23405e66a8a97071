"""HTTP server for scrapes, with a thread for each; a client that sends no request is dropped."""

from __future__ import annotations

import socket
import socketserver
import threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

ASK_S = 10.0  # most time for a request to arrive
STOP_S = 0.1  # interval of checks whether the server is to stop
ANYWHERE = ("0.0.0.0", "::")


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """A server for metrics on ``address``, from now on; port 0 takes a free one. Raises OSError."""

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.set_app(make_wsgi_app(registry))
        threading.Thread(target=self.serve_forever, args=(STOP_S,), name="recycle: metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """The address at which other hosts find the metrics."""
        host = socket.gethostname() if self.server_name in ANYWHERE else self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/metrics"

    def close(self) -> None:
        """Stop answering, within 0.1 s."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind as the standard library does, but without the name server's reverse look-up, which may take long."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore an error in a request: its client is gone, or has sent nothing."""


class _Handler(WSGIRequestHandler):
    timeout = ASK_S

    def log_message(self, format: str, *arguments: object) -> None:
        """Print no line for each scrape."""
