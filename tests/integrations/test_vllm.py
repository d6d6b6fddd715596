"""vLLM's server on CPUs with expert parallelism, as a user starts it.

A start takes a minute, so they are of the nightly lane; the gate runs test_vllm_layers.py.
.ci/vllm-env makes the environment.

In float32: there sums in another order change the sixth digit, which no greedy token notices. In
bfloat16 one process differs from itself when requests are batched another way.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from tests.cases.clock import scaled
from tests.cases.vllm.server import serve

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

EP = "--enable-expert-parallel"
FLOAT32 = ("--dtype", "float32", "--max-model-len", "256")


def prompts(number: int) -> list[list[int]]:
    chance = random.Random(6)
    return [
        [chance.randrange(1, 500) for _ in range(chance.randrange(4, 60))] for _ in range(number)
    ]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a saved model, by its kind."""
    from tests.cases.vllm.models import save

    return cache(lambda kind: save(kind, tmp_path_factory.mktemp(kind)))


def by_transformers(directory: Path, given: list[list[int]], num_tokens: int) -> list[list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return [
        model.generate(torch.tensor([one]), max_new_tokens=num_tokens, do_sample=False)[
            0, len(one) :
        ].tolist()
        for one in given
    ]


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["token_ids"] for answer in answers]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers and torch, on their way in
def test_two_ranks_answer_as_transformers_does(model: Any, tmp_path: Path) -> None:
    given, directory = prompts(12), model("qwen3")
    with serve(directory, tmp_path / "log", *FLOAT32, EP, "--data-parallel-size", "2") as server:
        alone = server.complete(given[0], 16)  # the other rank has dummy batches only
        got = server.complete_all(given, 16)
        assert server.text().count("Expert parallel tokens travel through") == 2
    want = by_transformers(directory, given, 16)
    assert alone["token_ids"] == want[0]
    assert tokens(got) == want


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "glm4"])
def test_ranks_answer_as_one_process(kind: str, model: Any, tmp_path: Path) -> None:
    given = prompts(64)
    forms = {
        "one": (),
        "two": (EP, "--data-parallel-size", "2"),
        "four": (EP, "--data-parallel-size", "4"),
        "same tokens": (EP, "--tensor-parallel-size", "2"),
        "both": (EP, "--tensor-parallel-size", "2", "--data-parallel-size", "2"),
        "two balanced": (EP, "--data-parallel-size", "2"),
        "both balanced": (EP, "--tensor-parallel-size", "2", "--data-parallel-size", "2"),
    }
    got = {}
    for name, options in forms.items():
        balance = "exact" if "balanced" in name else ""
        asked = {"TOKENYARD_VLLM_BALANCE": balance}
        with serve(model(kind), tmp_path / name, *FLOAT32, *options, **asked) as server:
            got[name] = tokens(server.complete_all(given, 32))
            assert ("share experts, with slack 0.0" in server.text()) is bool(balance)
    assert all(one == got["one"] for one in got.values())


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("victim", ["DP0_EP0", "DP1_EP1"])
def test_the_log_names_a_dead_worker(victim: str, model: Any, tmp_path: Path) -> None:
    options = (*FLOAT32, EP, "--data-parallel-size", "2")
    with serve(model("qwen3"), tmp_path / "log", *options) as server:
        failed = threading.Event()

        def ask(first: int) -> None:
            try:
                while True:
                    server.complete([first] * 20, 200)
            except (HTTPError, URLError, OSError):
                failed.set()

        askers = [threading.Thread(target=ask, args=(first,)) for first in range(1, 9)]
        for one in askers:
            one.start()
        time.sleep(scaled(5))
        found = re.search(rf"Worker_{victim} pid=(\d+)", server.text())
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        killed = time.monotonic()
        named = f"rank {victim[-1]} died"
        while named not in server.text():
            assert time.monotonic() < killed + scaled(10), server.text()[-4000:]
            time.sleep(0.02)
        assert "PeerDied" in server.text()
        server.process.wait(scaled(60))  # the end that vLLM makes of its own failures
        for one in askers:
            one.join(scaled(60))
        assert failed.is_set()


@pytest.mark.slow
def test_the_benchmark_compares_servers(tmp_path: Path) -> None:
    """A small model. With gloo its tokens are the same, or it raises; vLLM's own collectives round
    in another way on some processors.
    """
    script = Path(__file__).parents[2] / "benchmarks" / "vllm_serving.py"
    small = ("--layers", "1", "--hidden", "256", "--intermediate", "64", "--answer", "4")
    options = (*small, "--rounds", "1", "--logs", str(tmp_path), "--servers")
    done = subprocess.run(
        [sys.executable, str(script), *options, "tokenyard", "gloo", "shm"],
        capture_output=True,
        text=True,
        timeout=scaled(800),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "gloo: 4 of 4 answers are those of tokenyard" in done.stdout
    assert "\nshm: " in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_minutes_of_mixed_requests(model: Any, tmp_path: Path) -> None:
    """32 at once, prompts of 4 to 200 tokens in chunks of 64, answers of 1 to 50; all of them for
    rank 0, so that rank 1 has dummy batches only.
    """
    options = (EP, "--data-parallel-size", "2", "--max-model-len", "256")
    chunks = ("--enable-chunked-prefill", "--max-num-batched-tokens", "64")
    end, done = time.monotonic() + 600, []
    with serve(model("qwen3"), tmp_path / "log", *options, *chunks) as server:

        def ask(seed: int) -> None:
            chance = random.Random(seed)
            while time.monotonic() < end:
                prompt = [chance.randrange(1, 500) for _ in range(chance.randrange(4, 200))]
                num_tokens = chance.randrange(1, 50)
                answer = server.complete(prompt, num_tokens, dp_rank=0)
                assert len(answer["token_ids"]) == num_tokens
                done.append(num_tokens)

        with ThreadPoolExecutor(32) as pool:
            for one in [pool.submit(ask, seed) for seed in range(32)]:
                one.result()
    print(f"{len(done)} requests, {sum(done)} tokens in 600 s")
