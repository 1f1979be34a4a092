"""A reverse proxy as people put one in front of a server: below a path, for HTTP and sockets."""

import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Iterator

PREFIX = b"/world/"


@contextlib.contextmanager
def proxied(address: str, host: str = "") -> Iterator[str]:
    """Serve what a server has below /world/, and nothing else; returns the address of that.

    The Host header is kept, as a proxy must (`SECURITY.md`), unless another one is given.
    """
    name, _, port = address.partition(":")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                method, _, rest = self.rfile.readline().partition(b" ")
                head = b"".join(iter(self.rfile.readline, b"\r\n"))
                if not rest.startswith(PREFIX):
                    self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    return
                if host:
                    head = re.sub(rb"(?im)^host:.*", b"Host: " + host.encode() + b"\r", head)
                if not re.search(rb"(?im)^upgrade:", head):  # one request a connection
                    head = re.sub(rb"(?im)^connection:.*\n", b"", head) + b"Connection: close\r\n"
                with socket.create_connection((name, int(port))) as line:
                    request = method + b" /" + rest.removeprefix(PREFIX) + head + b"\r\n"
                    line.sendall(request)
                    back = threading.Thread(target=pump, args=(line, self.connection))
                    back.start()
                    pump(self.rfile, line)
                    back.join()

    def pump(source, target: socket.socket) -> None:
        read = source.recv if isinstance(source, socket.socket) else source.read1
        with contextlib.suppress(OSError):
            while data := read(2**16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 50

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}{PREFIX.decode()}"
        finally:
            server.shutdown()
            thread.join()
