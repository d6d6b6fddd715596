"""vLLM's server as a user starts it, on loopback, and its answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cases.clock import scaled
from tests.cases.programs import free_port

START_SECONDS = scaled(400)
END_SECONDS = scaled(20)
COMMON: tuple[str, ...] = (
    "--served-model-name",
    "model",
    "--dtype",
    "bfloat16",
    "--skip-tokenizer-init",
)
COMMON += ("--enforce-eager",)


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def complete(
        self, prompt: Sequence[int], num_tokens: int, dp_rank: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Greedy tokens after these, from a data parallel rank. Raises HTTPError on a 500."""
        body = {
            "model": "model",
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        headers = {"Content-Type": "application/json"}
        if dp_rank is not None:
            headers["X-data-parallel-rank"] = str(dp_rank)
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=scaled(300)) as answer:
            return json.loads(answer.read())["choices"][0]

    def complete_all(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, at_once: int = 32, **more: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda one: self.complete(one, num_tokens, **more), prompts))

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def serve(model: Path, log: Path, *options: str, **environment: str) -> Iterator[Server]:
    """A server that is ready, ended with all its processes afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *COMMON, *options]
    process = start(command, log, **environment)
    server = Server(url=f"http://127.0.0.1:{port}", log=log, process=process)
    try:
        wait_until_ready(server)
        yield server
    finally:
        end(process)


def start(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
            start_new_session=True,  # so that all its processes can be ended together
        )


def wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=scaled(5)).close()
            return
        except OSError:
            time.sleep(scaled(0.5))
    raise RuntimeError(f"the server did not start:\n{server.text()[-8000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the session that it leads
    process.wait(END_SECONDS)
