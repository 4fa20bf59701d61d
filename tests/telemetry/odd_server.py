"""A server that answers whatever it is asked by bytes that need not end, for what must not hang or grow."""

import contextlib
import itertools
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Odd:
    """`num_bytes`: that went out; `requests`: the first bytes of each that came."""

    url: str = ""
    num_bytes: int = 0
    requests: list[bytes] = field(default_factory=list)


def endless(piece: bytes, pause_seconds: float = 0.0) -> Iterator[bytes]:
    """The piece again and again."""
    for _ in itertools.count():
        yield piece
        time.sleep(pause_seconds)


@contextlib.contextmanager
def odd_server(answer: Callable[[], Iterable[bytes]]) -> Iterator[Odd]:
    """On a free port of this machine. Each connection's first request is answered, then it is closed."""
    odd = Odd()
    has_ended = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                odd.requests.append(self.request.recv(1 << 16))
                for piece in answer():
                    if has_ended.is_set():
                        return
                    self.request.sendall(piece)
                    odd.num_bytes += len(piece)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        odd.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield odd
        finally:
            has_ended.set()
            server.shutdown()
            thread.join()
