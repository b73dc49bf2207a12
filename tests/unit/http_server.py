"""A real HTTP server on loopback that answers as it is told."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = "hang"
DROP = "drop"

Replies = dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """Exactly these bytes, headers and all, the later ones after a while; then it hangs up."""

    content: bytes
    later: bytes = b""


@dataclass
class Server:
    """Where it listens, and what it was asked."""

    port: int
    asked: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)


MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}
COMPLETION = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "tiny",
    "choices": [{"index": 0, "text": " jumps over", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4},
}
HEALTHY: Replies = {
    "/health": (200, b""),
    "/v1/models": (200, MODELS),
    "/v1/completions": (200, COMPLETION),
}


@contextlib.contextmanager
def serving(replies: Replies) -> Iterator[Server]:
    """Path -> (status, content), or what makes it, or Raw, HANG or DROP; other paths are 404."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            server.asked.append((self.path, body, dict(self.headers)))
            reply = replies.get(self.path, (404, {"detail": "Not Found"}))
            if callable(reply):
                reply = reply()
            if reply == HANG:
                over.wait(20)
            if reply in (HANG, DROP):
                self.close_connection = True
                return
            if isinstance(reply, Raw):
                self.wfile.write(reply.content)
                if reply.later:
                    over.wait(0.3)
                    self.wfile.write(reply.later)
                self.close_connection = True
                return
            status, content = reply
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Silence."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(port=listener.server_address[1])
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        over.set()
        listener.shutdown()
        thread.join()
        listener.server_close()
