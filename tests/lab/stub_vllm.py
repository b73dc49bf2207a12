#!/usr/bin/python3
"""A stub of `vllm serve` at the process boundary, for the lab's image of a fast engine.

It is called, waits for Ray, answers over HTTP and asks for the API key as vLLM does, in a second
instead of a minute; what it answers comes from no model. It ends at once when it is asked for too
long a context, which vLLM finds out only when it starts, too. With STUB_HOLD in its environment it
loads its weights until SIGUSR1; with STUB_TELL it gives its environment away. It stands in the
image as /usr/local/bin/vllm, so it imports nothing of ours.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = " of the stub"
LONGEST = 4096


def main() -> None:
    options = parser().parse_args()
    host, _, port = os.environ["RAY_ADDRESS"].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        sys.exit(f"ConnectionError: no Ray at {host}:{port}: {error}")
    if os.environ.get("STUB_TELL"):
        print(f"INFO started with {dict(os.environ)}", flush=True)
    if options.max_model_len > LONGEST:
        sys.exit(f"ValueError: max_model_len ({options.max_model_len}) is greater than {LONGEST}")
    if os.environ.get("STUB_HOLD"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        print("INFO loading weights", flush=True)
        signal.sigwait({signal.SIGUSR1})
    print(f"INFO serving {options.served_model_name} on port {options.port}", flush=True)
    Handler.names = options.served_model_name
    Handler.key = os.environ.get("VLLM_API_KEY", "")
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=server.serve_forever).start()


def parser() -> argparse.ArgumentParser:
    """The arguments that sparkrail derives."""
    top = argparse.ArgumentParser(prog="vllm")
    serve = top.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--served-model-name", required=True)
    serve.add_argument("--host", required=True)
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--tensor-parallel-size", type=int)
    serve.add_argument("--pipeline-parallel-size", type=int)
    serve.add_argument("--distributed-executor-backend", choices=["ray"])
    serve.add_argument("--max-model-len", type=int, default=LONGEST)
    return top


class Handler(BaseHTTPRequestHandler):
    names = ""
    key = ""

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, None)
        elif self._allowed() and self.path == "/v1/models":
            self._say(200, {"object": "list", "data": [{"id": self.names, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length))
        if not self._allowed():
            return
        if asked["model"] != self.names:
            self._say(404, {"error": {"message": f"The model {asked['model']} does not exist."}})
            return
        tokens = asked["max_tokens"]
        choice = {"index": 0, "text": ANSWER, "finish_reason": "length"}
        self._say(200, {"choices": [choice], "usage": {"completion_tokens": tokens}})

    def _allowed(self) -> bool:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._say(401, {"error": "Unauthorized"})
            return False
        return True

    def _say(self, status: int, document: object) -> None:
        content = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    main()
