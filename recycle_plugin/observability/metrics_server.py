"""The server that answers scrapes over HTTP, in a thread each; whoever connects and then says nothing is dropped."""

from __future__ import annotations

import socket
import socketserver
import threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

ASK_S = 10.0  # how long a request may take to come
STOP_S = 0.1  # how often it is looked whether the server is to stop
ANYWHERE = ("0.0.0.0", "::")


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """A server for metrics that listens on ``address`` from now on, with port 0 on one that is free.

    Raises OSError where that is not possible.
    """

    daemon_threads = True
    allow_reuse_port = False

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.set_app(make_wsgi_app(registry))
        threading.Thread(target=self.serve_forever, args=(STOP_S,), name="recycle: metrics", daemon=True).start()

    @property
    def url(self) -> str:
        """The address at which others find the metrics."""
        host = socket.gethostname() if self.server_name in ANYWHERE else self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/metrics"

    def close(self) -> None:
        """Stop answering; takes 0.1 s, at most."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind as the standard library does, but without asking the name server for a name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """The standard library's call after an error in a request: nothing, whoever asked is gone, or has said
        nothing.
        """


class _Handler(WSGIRequestHandler):
    timeout = ASK_S

    def log_message(self, format: str, *arguments: object) -> None:
        """No line for each scrape."""
