"""Tokens a second of vLLM's server on two cores: the plugin, and what a user would run instead.

    python benchmarks/vllm_serving.py      # in an environment of .ci/vllm-env; some ten minutes
    python benchmarks/vllm_serving.py --servers tokenyard shm tensor    # 5 GB of memory a server
    python benchmarks/vllm_serving.py --servers balanced tokenyard --skew 1 --loads prefill decode

Six servers, of two ranks with a core each, but for the last:

    tokenyard   the plugin; data parallel ranks share the experts
    balanced    the same with TOKENYARD_VLLM_BALANCE (--balance): only if it is named
    shm         the same, but tokens travel through vLLM's own shared-memory collectives
    gloo        the same, but tokens travel through torch.distributed (`vllm_gathering.py`)
    tensor      --tensor-parallel-size 2, without plugin and without expert parallelism
    one         one process with both cores, without plugin

The model is a Qwen3-MoE with random weights in bfloat16: 8 layers of 64 experts, top-8, hidden size
2048, intermediate size of an expert 256. "prefill" is prompts of 1024 tokens, of which one token is
asked for; "decode" is 32 sequences at once; "changing" is prompts of 8 to 256 tokens and answers of
4 to 64, a dozen at once, so that almost every step has another size; "alone" is one sequence of
32 tokens after the other. Without AMX the experts' arithmetic hides what lies between: take
--hidden 512 --intermediate 64 --layers 16 there. With --skew routers choose experts by Zipf's law,
and the first experts, of rank 0, are the hot ones, unless --scattered over ranks in each layer.

All servers are up at once, and sleep (SIGSTOP) but for the one that is measured. They take turns,
in another order each round. A figure is the median over rounds; so is a ratio, of figures of the
same round. Before that each server answers a few prompts one by one. With gloo the tokens must be
the plugin's. The others are counted: vLLM's all-reduce cuts bfloat16 sums off on Cascade Lake, and
a tensor parallel rank adds up another part of each product.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cases.vllm.server import Server, serve

ROOT = Path(__file__).parents[1]
EXPERT_PARALLEL = ("--data-parallel-size", "2", "--enable-expert-parallel")
TENSOR_PARALLEL = ("--tensor-parallel-size", "2")
SERVERS = {
    "tokenyard": EXPERT_PARALLEL,
    "balanced": EXPERT_PARALLEL,
    "shm": EXPERT_PARALLEL,
    "gloo": EXPERT_PARALLEL,
    "tensor": TENSOR_PARALLEL,
    "one": (),
}
# What the requests need and no more: the memory of all servers is taken at once.
COMMON: tuple[str, ...] = ("--max-model-len", "1152", "--max-num-batched-tokens", "2048")
COMMON += ("--num-gpu-blocks-override", "128", "--no-enable-prefix-caching")


class Load(NamedTuple):
    prompts: list[list[int]]
    answers: list[int]  # tokens of each
    total: int  # tokens that are counted
    at_once: int = 32


def loads(args: argparse.Namespace) -> dict[str, Load]:
    chance = random.Random(1)

    def prompts(*lengths: int) -> list[list[int]]:
        return [[chance.randrange(1, 500) for _ in range(length)] for length in lengths]

    long, few = [1024] * args.prompts, [8] * 32
    lengths = [chance.randint(8, 256) for _ in range(args.changing)]
    answers = [chance.randint(4, 64) for _ in range(args.changing)]
    return {
        "prefill": Load(prompts(*long), [1] * len(long), sum(long)),
        "decode": Load(prompts(*few), [args.answer] * len(few), len(few) * args.answer),
        "changing": Load(prompts(*lengths), answers, sum(lengths) + sum(answers), 12),
        "alone": Load(prompts(8, 8), [32, 32], 64, 1),
    }


def ask(server: Server, load: Load, num_ranks: int) -> list[list[int]]:
    """The tokens of all answers. Data parallel ranks get as many of the prompts each."""

    def one(number: int) -> list[int]:
        dp_rank = number % num_ranks if num_ranks > 1 else None
        return server.complete(load.prompts[number], load.answers[number], dp_rank)["token_ids"]

    with ThreadPoolExecutor(load.at_once) as pool:
        return list(pool.map(one, range(len(load.prompts))))


@contextmanager
def awake(server: Server) -> Iterator[None]:
    """All its processes are of the session that the first one leads."""
    os.killpg(server.process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(server.process.pid, signal.SIGSTOP)


@contextmanager
def started(
    name: str, model: Path, folder: Path, logs: Path, balance: str = "exact"
) -> Iterator[Server]:
    """A server that sleeps."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    parts = [cores] if name == "one" else [cores[:half], cores[half:]]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    if name in ("shm", "gloo"):
        path = str(add_plugin(name, folder / f"{name}-path"))
        environment["PYTHONPATH"] = os.pathsep.join([path, environment["PYTHONPATH"]])
    environment["TOKENYARD_VLLM_BALANCE"] = balance if name == "balanced" else ""
    if name in ("tensor", "one"):
        environment["TOKENYARD_VLLM"] = "0"
    options = (*COMMON, *SERVERS[name])
    with serve(model, logs / f"{name}.log", *options, **environment) as server:
        os.killpg(server.process.pid, signal.SIGSTOP)
        try:
            yield server
        finally:
            os.killpg(server.process.pid, signal.SIGCONT)


def add_plugin(name: str, path: Path) -> Path:
    """A distribution whose entry point vLLM finds beside the plugin's."""
    info = path / f"{name}_exchange-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-exchange\nVersion: 1\n")
    entry = f"{name} = benchmarks.vllm_gathering:{name}"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return path


def num_ranks(name: str) -> int:
    """With requests of their own."""
    return 2 if SERVERS[name] is EXPERT_PARALLEL else 1


def compare(servers: dict[str, Server]) -> None:
    """Prompts one by one: then it does not depend on the time which of them share a step."""
    chance = random.Random(2)
    prompts = [[chance.randrange(1, 500) for _ in range(length)] for length in (5, 17, 64, 300)]
    answers = {}
    for name, server in servers.items():
        with awake(server):
            one_by_one = Load(prompts, [16] * len(prompts), 0, 1)
            answers[name] = ask(server, one_by_one, num_ranks(name))
    first, want = next(iter(answers.items()))
    for name, got in answers.items():
        same = sum(one == other for one, other in zip(got, want))
        print(f"{name}: {same} of {len(want)} answers are those of {first}", flush=True)
        assert got == want or {name, first} != {"tokenyard", "gloo"}, (name, got, want)


def measure(
    servers: dict[str, Server], work: dict[str, Load], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second by load and server, of each round. The first one warms up."""
    figures: dict[str, dict[str, list[float]]] = {
        load: {name: [] for name in servers} for load in work
    }
    order = list(servers)
    for number in range(rounds + 1):
        for name in order:
            with awake(servers[name]):
                for kind, load in work.items():
                    begin = time.perf_counter()
                    ask(servers[name], load, num_ranks(name))
                    rate = load.total / (time.perf_counter() - begin)
                    if number:
                        figures[kind][name].append(rate)
                    print(f"round {number}: {name} {kind} {rate:.1f}", file=sys.stderr, flush=True)
        order = order[1:] + order[:1]
    return figures


def show(figures: dict[str, dict[str, list[float]]]) -> None:
    for kind, rates in figures.items():
        first = next(iter(rates))
        print(f"\n{kind:12}{'tokens/s':>12}{'quartiles':>20}{first + ' / it':>18}")
        for name, all_rates in rates.items():
            ratios = [mine / other for mine, other in zip(rates[first], all_rates)]
            ratio = f"{statistics.median(ratios):18.3f}" if name != first else ""
            print(f"{name:12}{statistics.median(all_rates):12.1f}{spread(all_rates):>20}{ratio}")


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.1f} to {high:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name in SERVERS if name != "balanced"]
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=usual)
    parser.add_argument("--loads", nargs="+", default=["prefill", "decode", "changing", "alone"])
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of Zipf's law")
    parser.add_argument("--scattered", action="store_true", help="hot experts are on any rank")
    parser.add_argument("--balance", default="exact", help="of the server balanced: or a slack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=4, help="long ones, of a round")
    parser.add_argument("--changing", type=int, default=36, help="prompts of that load")
    parser.add_argument("--answer", type=int, default=32, help="tokens of a sequence of decode")
    parser.add_argument("--logs", type=Path, help="a directory that keeps the servers' logs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not before servers have ended
    from tests.cases.vllm.models import save, skew

    def alter(model: Any) -> None:
        if args.skew:
            busiest = " ".join(f"{one:.2f}" for one in skew(model, args.skew, args.scattered))
            print(f"busiest of two ranks over their mean, by layer: {busiest}")

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        here = Path(folder)
        model = save(
            "qwen3",
            here / "model",
            alter,
            num_hidden_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=max(4, args.hidden // 128),
            head_dim=128,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=args.intermediate,
            max_position_embeddings=2048,
        )
        logs = args.logs or here
        servers = {
            name: stack.enter_context(started(name, model, here, logs, args.balance))
            for name in args.servers
        }
        compare(servers)
        work = {name: load for name, load in loads(args).items() if name in args.loads}
        figures = measure(servers, work, args.rounds)
    show(figures)


if __name__ == "__main__":
    main()
