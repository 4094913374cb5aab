"""The HTTP servers of vLLM and SGLang, with a process as their worker.

When that dies, the streams end with an error, and then the server.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TITLES = "VLLM::Worker_TP1 sglang::scheduler_TP1"
WORKER = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", TITLES])
counts = {"running": 0, "tokens": 0}
asleep = threading.Event()
lock = threading.Lock()


def count(name: str, by: int) -> None:
    with lock:
        counts[name] += by


class Handler(BaseHTTPRequestHandler):
    """The answers."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            running, tokens = counts["running"], counts["tokens"]
            self.answer(
                f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine=\"0\"}} {running}.0\n"
                f"vllm:generation_tokens_total{{engine=\"0\"}} {tokens}.0\nvllm:generation_tokens_created 5.0\n"
            )  # fmt: skip
        elif self.path.startswith("/v1/loads"):
            self.answer(json.dumps({"loads": [{"num_running_reqs": counts["running"], "num_waiting_reqs": 0}]}))
        else:
            self.answer("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
            self.answer(json.dumps({"results": 2 * [{"gpu": "H100"}]}))
        elif self.path == "/update_weights_from_tensor":
            assert [pickle.loads(base64.b64decode(one)) for one in body["serialized_named_tensors"]] == [[], []]
            assert body["load_format"] in sys.argv[sys.argv.index("--custom-weight-loader") :]
            for rank in range(2):
                state = {"gpu": "H100", "used_mb": 1.0 if asleep.is_set() else 9.0}
                Path(os.environ["SERVING_ANSWERS"], f"{rank}.json").write_text(json.dumps(state))
            self.answer(json.dumps({"success": True, "message": ""}))
        elif self.path.endswith("_memory_occupation"):
            assert "--enable-memory-saver" in sys.argv
            asleep.set() if self.path == "/release_memory_occupation" else asleep.clear()
            self.answer("")
        elif body.get("stream"):
            self.stream(body)
        elif self.path == "/generate":
            assert not asleep.is_set()
            self.answer(json.dumps({"output_ids": body["input_ids"][: body["sampling_params"]["max_new_tokens"]]}))
        else:
            self.answer(json.dumps({"choices": [{"token_ids": body["prompt"][: body["max_tokens"]]}]}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def stream(self, body: Any) -> None:
        of_sglang = self.path == "/generate"
        most = body["sampling_params"]["max_new_tokens"] if of_sglang else body["max_tokens"]
        self.send_response(200)
        self.end_headers()
        count("running", 1)
        try:
            for token in range(most):
                if WORKER.poll() is not None:
                    self.piece({"error": "EngineDeadError"})
                    return
                self.piece({"output_ids": [token]} if of_sglang else {"choices": [{"token_ids": [token]}]})
                count("tokens", 1)
                time.sleep(0.01)
        except OSError:
            pass  # the client is gone
        finally:
            count("running", -1)

    def piece(self, what: Any) -> None:
        self.wfile.write(f"data: {json.dumps(what)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def end(code: int) -> None:
    WORKER.kill()
    os._exit(code)


def watch() -> None:
    WORKER.wait()
    print("(Worker_TP0) PeerLostError: rank 1 is gone", flush=True)
    while counts["running"]:
        time.sleep(0.01)
    end(1)


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port
signal.signal(signal.SIGTERM, lambda *_: end(0))
threading.Thread(target=watch, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
