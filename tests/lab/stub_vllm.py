#!/usr/bin/python3
"""A stub of `vllm serve` at the process boundary, for the lab's image of a fast engine.

It is called, waits for Ray, answers over HTTP and asks for the API key as vLLM does, in a second
instead of a minute; what it answers comes from no model. It stands in the image as /usr/local/bin/
vllm, so it imports nothing of ours.
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = " of the stub"


def main() -> None:
    options = parser().parse_args()
    host, _, port = os.environ["RAY_ADDRESS"].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        sys.exit(f"ConnectionError: no Ray at {host}:{port}: {error}")
    if options.hold:
        print("INFO loading weights", flush=True)
        while True:
            time.sleep(60)
    print(f"INFO serving {options.served_model_name} on port {options.port}", flush=True)
    Handler.names = options.served_model_name
    Handler.key = os.environ.get("VLLM_API_KEY", "")
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    threading.Thread(target=server.serve_forever).start()


def parser() -> argparse.ArgumentParser:
    """The arguments that sparkrail derives, and one of the stub's own."""
    top = argparse.ArgumentParser(prog="vllm")
    serve = top.add_subparsers(required=True).add_parser("serve")
    serve.add_argument("model")
    serve.add_argument("--served-model-name", required=True)
    serve.add_argument("--host", required=True)
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--tensor-parallel-size", type=int)
    serve.add_argument("--pipeline-parallel-size", type=int)
    serve.add_argument("--distributed-executor-backend", choices=["ray"])
    serve.add_argument("--hold", action="store_true", help="never begin to answer")
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
