#!/usr/bin/python3
"""A stub of `vllm serve` at the process boundary, for the lab's image of a fast engine.

It is called, waits for Ray, answers over HTTP and asks for the API key as vLLM does, in a second
instead of a minute; what it answers comes from no model. It ends at once when it is asked for too
long a context, which vLLM finds out only when it starts, too. With STUB_HOLD in its environment it
loads its weights until SIGUSR1; with STUB_TELL it gives its environment away; with STUB_SLOW it
takes so many seconds for each token. It counts as vLLM does, and counts as busy, or as busy without
getting on, while /busy or /stuck stands in its container; /dead makes all completions
fail. /tmp/crash-once makes it end at its start, and is gone then. It stands in the image as
/usr/local/bin/vllm, so it imports nothing of ours.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWER = " of the stub"
LONGEST = 4096
SECRET = ("_KEY", "_TOKEN", "_PASSWORD")
CRASH_ONCE = Path("/tmp/crash-once")
SLOW = float(os.environ.get("STUB_SLOW", "0"))


def main() -> None:
    options = parser().parse_args()
    host, _, port = os.environ["RAY_ADDRESS"].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        sys.exit(f"ConnectionError: no Ray at {host}:{port}: {error}")
    if os.environ.get("STUB_TELL"):
        print(f"INFO started with {dict(os.environ)}", flush=True)
        # Once more on a line that is short enough to be told whole.
        secret = {name: text for name, text in os.environ.items() if name.endswith(SECRET)}
        print(f"INFO of these: {secret}", flush=True)
    if CRASH_ONCE.exists():
        CRASH_ONCE.unlink()
        sys.exit("RuntimeError: CUDA error: an illegal memory access was encountered")
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
    made = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, None)
        elif self.path == "/metrics":
            self._metrics()
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
        if Path("/dead").exists():
            self._say(500, {"error": {"message": "EngineDeadError"}})
            return
        tokens = asked["max_tokens"]
        if asked.get("stream"):
            self._stream(tokens)
            return
        time.sleep(SLOW * tokens)
        Handler.made += tokens
        choice = {"index": 0, "text": ANSWER, "finish_reason": "length"}
        self._say(200, {"choices": [choice], "usage": {"completion_tokens": tokens}})

    def _stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(tokens):
            time.sleep(SLOW)
            Handler.made += 1
            self._event({"choices": [{"index": 0, "text": " x"}]})
        self._event({"choices": [], "usage": {"completion_tokens": tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, document: object) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

    def _metrics(self) -> None:
        busy = Path("/busy").exists()
        Handler.made += 10 * busy
        running = int(busy or Path("/stuck").exists())
        name = f'{{engine="0",model_name="{self.names}"}}'
        text = (
            f"vllm:num_requests_running{name} {running}.0\n"
            f"vllm:num_requests_waiting{name} 0.0\n"
            f"vllm:generation_tokens_total{name} {Handler.made}.0\n"
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

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
