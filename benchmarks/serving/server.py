"""vLLM's HTTP server with a client that cancels a request, or with a worker that is killed.

    python -m benchmarks.serving.server NAME OUT --layers 2 --batches 1

Of NAME the mode says which: "server" or "killed". ``benchmarks.serving.run`` starts it. What was seen is in the
result's ``facts``. ``sglang_server`` does the same with SGLang's. Standard library only.
"""

from __future__ import annotations

import argparse
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

from benchmarks.serving.engine import MAX_TOKENS, Result, begin, model, prompts, settings, since
from benchmarks.serving.names import Name
from benchmarks.serving.run import session

CLIENTS, TOKENS, CHUNKS = 8, 32, 5
LONG = MAX_TOKENS - 100  # tokens of a request that is cancelled, or whose server ends
PATIENCE = 90.0  # seconds for what should take less
BATCHES = [1, 8]
TOLD = re.compile(r"Peer\w+Error|rank \d+ is gone|died unexpectedly|crashed|EngineDead|ipcreduce has served")
Facts = dict[str, Any]


class Client:
    """vLLM's server on a port of this machine, with the settings of the engines that are measured."""

    worker = "Worker_TP1"  # the title that the server gives a process
    piece = '"choices"'  # in what a stream gives for each token

    def __init__(self, port: int, folder: Path) -> None:
        """:param folder: the model's."""
        self.port, self.folder = port, folder

    def command(self, name: Name) -> list[str]:
        """The words that start it."""
        known = settings(name, self.folder, BATCHES)
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--host", "127.0.0.1", "--port", str(self.port)]
        for key, value in known.items():
            option = f"--{key.replace('_', '-')}"
            if isinstance(value, bool):
                words += [option] if value else [f"--no-{option[2:]}"]
            else:
                words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words

    def environment(self) -> dict[str, str]:
        """The engine is a process of its own, as people run it. The second has the server take /collective_rpc."""
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}

    def workers(self, what: str) -> list[Any]:
        """The answers of the workers: "state", or to "fill"."""
        answer = json.loads(self.ask("POST", "/collective_rpc", {"method": f"bench_{what}"}))
        found: list[Any] = answer["results"]
        return found

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
        answer = json.loads(self.ask("POST", "/v1/completions", body(prompt, TOKENS)))
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def stream(self, prompt: list[int]) -> Iterator[str]:
        """The pieces of a long answer. To close the iterator is to cancel the request."""
        return self.pieces("/v1/completions", body(prompt, LONG))

    def pieces(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        """What a stream gives."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            words = json.dumps({**body, "stream": True})
            connection.request("POST", path, words, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()
        finally:
            connection.close()

    def running(self) -> float:
        """The number of requests that run."""
        return self.metric("num_requests_running")

    def generated(self) -> Any:
        """The number of tokens that all requests got; None if the server does not say."""
        return self.metric("generation_tokens_total")

    def metric(self, name: str) -> float:
        """The sum of a metric of vLLM over its labels."""
        lines = self.ask("GET", "/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"vllm:{name}[{{ ]", line))


def body(prompt: list[int], count: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def main() -> None:
    args, result = begin(__doc__)
    tried(args, result, Client, model(args.out, args.layers), {"server": cancelled, "killed": killed}[args.name.mode])


def tried(
    args: argparse.Namespace, result: Result, kind: type[Client], folder: Path,
    trial: Callable[[Any, subprocess.Popen[bytes], Path], Facts],
) -> None:  # fmt: skip
    """Start a server, and note what the trial says."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        client = kind(free.getsockname()[1], folder)
    start = time.perf_counter()
    server = subprocess.Popen(client.command(args.name), env=os.environ | client.environment())
    wait_for(lambda: is_up(client, server), 10 * PATIENCE)  # it compiles first; the limit of run.py is less
    result.note(start_s=since(start), workers=client.workers("state"))
    client.workers("fill")
    result.note(facts=trial(client, server, result.path.with_suffix(".log")), done=True)


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
def cancelled(client: Client, server: subprocess.Popen[bytes], _log: Path) -> Facts:
    """Requests of several clients, before and after one that has gone away in the middle of its answer."""
    before = together(client)
    served = client.generated()
    long = client.stream(asked()[0])
    for _ in range(CHUNKS):
        next(long)
    long.close()  # type: ignore[attr-defined]
    ended = wait_for(lambda: client.running() == 0)
    wasted = None if served is None else int(client.generated() - served)
    after = together(client)
    return {
        "clients with the same tokens before and after": sum(
            one == two for one, two in zip(before, after, strict=True)
        ),
        "clients": CLIENTS,
        "seconds until the request that its client had left was ended": ended,
        "its tokens, of those asked for": [wasted, LONG],
        **stopped(server),
    }


def stopped(server: subprocess.Popen[bytes]) -> Facts:
    """End the server as its user does."""
    start = time.perf_counter()
    server.terminate()
    code = ending(server)
    return {"seconds until the server had ended, and its exit code": [since(start), code]}


def asked() -> list[list[int]]:
    return [one["prompt_token_ids"] for one in prompts(CLIENTS)]


def together(client: Client) -> list[list[int]]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(client.tokens, asked()))


def killed(client: Client, server: subprocess.Popen[bytes], log: Path) -> Facts:
    """SIGKILL for one worker, while every client reads a long answer."""
    streams = [client.stream(prompt) for prompt in asked()]
    for one in streams:
        next(one)
    [worker] = [pid for pid in session(os.getsid(0)) if client.worker in title(pid)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        os.kill(worker, signal.SIGKILL)
        start = time.perf_counter()
        heard = list(pool.map(lambda one: last_of(one, start, client.piece), streams))
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


def last_of(stream: Iterator[str], start: float, usual: str) -> tuple[float, str]:
    """When an answer ended, and with which piece or exception."""
    last = ""
    try:
        for piece in stream:
            last = "a piece, and then the end" if usual in piece else piece[:200]
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
