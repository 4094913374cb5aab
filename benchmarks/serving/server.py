"""vLLM's HTTP server with a client that cancels a request, or with a worker that is killed.

    python -m benchmarks.serving.server NAME OUT --layers 2 --batches 1

Of NAME the mode says which: "server" or "killed". ``benchmarks.serving.run`` starts it. What was seen is in the
result's ``facts``. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.serving.engine import MAX_TOKENS, begin, model, prompts, settings, since
from benchmarks.serving.names import Name
from benchmarks.serving.run import session

CLIENTS, TOKENS, CHUNKS = 8, 32, 5
LONG = MAX_TOKENS - 100  # tokens of a request that is cancelled, or whose server ends
PATIENCE = 90.0  # seconds for what should take less
BATCHES = [1, 8]
WORKER = "Worker_TP1"  # the title that vLLM gives a process
TOLD = re.compile(r"Peer\w+Error|rank \d+ is gone|died unexpectedly|EngineDead|ipcreduce has served")


class Client:
    """Requests to the server on a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: Any = None) -> str:
        """The answer's text. :raises RuntimeError: for any status but 200."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {text[:300]}")
        return text

    def tokens(self, prompt: list[int]) -> list[int]:
        """The greedy tokens that follow a prompt."""
        found: list[int] = json.loads(self.ask("POST", "/v1/completions", body(prompt, TOKENS)))["choices"][0][
            "token_ids"
        ]
        return found

    def stream(self, prompt: list[int]) -> Iterator[str]:
        """The pieces of a long answer. To close the iterator is to cancel the request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            words = json.dumps({**body(prompt, LONG), "stream": True})
            connection.request("POST", "/v1/completions", words, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric of vLLM over its labels."""
        lines = self.ask("GET", "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"vllm:{name}[{{ ]", line))


def body(prompt: list[int], count: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def main() -> None:
    args, result = begin(__doc__)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = time.perf_counter()
    server = subprocess.Popen(command(args.name, model(args.out, args.layers), port), env=environment())
    client = Client(port)
    wait_for(lambda: is_up(client, server), 10 * PATIENCE)  # it compiles first; the limit of run.py is less
    workers = json.loads(client.ask("POST", "/collective_rpc", {"method": "bench_state"}))["results"]
    result.note(start_s=since(start), workers=workers)
    client.ask("POST", "/collective_rpc", {"method": "bench_fill"})
    facts = {"server": cancelled, "killed": killed}[args.name.mode](client, server, result.path.with_suffix(".log"))
    result.note(facts=facts, done=True)


def command(name: Name, folder: Path, port: int) -> list[str]:
    """vLLM's server, with the settings of the engines that are measured."""
    known = settings(name, folder, BATCHES)
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    for key, value in known.items():
        option = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value else [f"--no-{option[2:]}"]
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def environment() -> dict[str, str]:
    """The engine is a process of its own, as people run it. The second has the server take /collective_rpc."""
    return {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}


def is_up(client: Client, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None:
        sys.exit(f"the server ended with {server.returncode}; the reason is above")
    try:
        client.ask("GET", "/health")
    except (OSError, HTTPException, RuntimeError):
        return False
    return True


def wait_for(what: Callable[[], bool], patience: float = PATIENCE) -> float | None:
    """Seconds until it was true; None if it was not in time."""
    start = time.perf_counter()
    while not what():
        if time.perf_counter() - start > patience:
            return None
        time.sleep(0.05)
    return round(time.perf_counter() - start, 2)


# ---- the trials
def cancelled(client: Client, server: subprocess.Popen[bytes], _log: Path) -> dict[str, Any]:
    """Requests of several clients, before and after one that has gone away in the middle of its answer."""
    before = together(client)
    served = client.metric("generation_tokens_total")
    long = client.stream(asked()[0])
    for _ in range(CHUNKS):
        next(long)
    long.close()  # type: ignore[attr-defined]
    ended = wait_for(lambda: client.metric("num_requests_running") == 0)
    wasted = client.metric("generation_tokens_total") - served
    after = together(client)
    start = time.perf_counter()
    server.terminate()
    code = ending(server)
    return {
        "clients with the same tokens before and after": sum(
            one == two for one, two in zip(before, after, strict=True)
        ),
        "clients": CLIENTS,
        "seconds until the request that its client had left was ended": ended,
        "its tokens, of those asked for": [int(wasted), LONG],
        "seconds until the server had ended, and its exit code": [since(start), code],
    }


def asked() -> list[list[int]]:
    return [one["prompt_token_ids"] for one in prompts(CLIENTS)]


def together(client: Client) -> list[list[int]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(client.tokens, asked()))


def killed(client: Client, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """SIGKILL for one worker, while every client reads a long answer."""
    streams = [client.stream(prompt) for prompt in asked()]
    for one in streams:
        next(one)
    [worker] = [pid for pid in session(os.getsid(0)) if WORKER in title(pid)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        os.kill(worker, signal.SIGKILL)
        start = time.perf_counter()
        heard = list(pool.map(lambda one: last_of(one, start), streams))
    code = ending(server)
    told = [line[:200] for line in log.read_text(errors="replace").splitlines() if TOLD.search(line)]
    return {
        "seconds until each client heard it": [seconds for seconds, _ in heard],
        "what they heard": sorted({text for _, text in heard}),
        "seconds until the server had ended, and its exit code": [since(start), code],
        "log": list({line.partition("] ")[2]: line for line in told}.values())[:12],  # each text once
    }


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:  # it has ended since
        return ""


def last_of(stream: Iterator[str], start: float) -> tuple[float, str]:
    """When an answer ended, and with which piece or exception."""
    last = ""
    try:
        for piece in stream:
            last = "a piece, and then the end" if '"choices"' in piece else piece[:200]
    except (OSError, HTTPException) as error:
        last = repr(error)[:200]
    return since(start), last


def ending(server: subprocess.Popen[bytes]) -> int | None:
    """The exit code; None if it had to be killed."""
    with suppress(subprocess.TimeoutExpired):
        return server.wait(PATIENCE)
    server.kill()
    server.wait()
    return None


if __name__ == "__main__":
    main()
