"""Importing does nothing, and quickly."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenyard
from tests.cases.clock import scaled

HEAVY = ("numba", "llvmlite", "triton", "transformers", "matplotlib", "rich", "typer", "hypothesis")


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=scaled(250),
        check=True,
    )


@pytest.mark.parametrize(
    "code", ["import tokenyard", "from tokenyard import Buffer", "import tokenyard.testing"]
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    loaded = run(f"{code}; import sys; print(*sys.modules)").stdout.split()
    assert "tokenyard" in loaded
    assert "tokenyard.nn" not in loaded
    assert not set(HEAVY) & set(loaded)


def test_the_core_loads_no_wing() -> None:
    core = "tokenyard, tokenyard.buffer, tokenyard.nn, tokenyard.testing"
    loaded = run(f"import {core}, sys; print(*sys.modules)").stdout.split()
    assert "tokenyard.engine.engine" in loaded
    wings = ("compat", "integrations", "observe", "planner", "tools")
    assert not [name for name in loaded if name.startswith(tuple(f"tokenyard.{w}" for w in wings))]


def test_only_who_compiles_pays_for_the_compiler() -> None:
    loaded = run("import tokenyard.nn, sys; print(*sys.modules)").stdout.split()
    assert "tokenyard.nn" in loaded
    assert not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(loaded)


def test_importing_starts_nothing() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "import torch, threading; threads = threading.active_count()\n"
        "from tokenyard import Buffer\n"
        "assert threading.active_count() == threads and dict(os.environ) == before\n"
        "assert not torch.distributed.is_initialized()"
    )
    run(code)


@pytest.mark.slow
def test_import_costs_at_most_a_tenth_of_torchs() -> None:
    """On top of torch, which takes a second or so: the best of three, on a machine that others
    use too.
    """

    def share() -> float:
        lines = run("import torch, tokenyard", "-X", "importtime").stderr.splitlines()
        taken = {}
        for name in ("torch", "tokenyard"):
            (line,) = [line for line in lines if re.search(rf"\| {name}$", line)]
            taken[name] = int(line.split("|")[1])
        return taken["tokenyard"] / taken["torch"]

    assert min(share() for _ in range(3)) < 0.1


# What users import from where. A name that is no longer here is an incompatible change.
PUBLIC = {
    "tokenyard": """
        Aligned Buffer BufferClosed BufferInUse CallMismatch Combined Config DispatchLayout
        Dispatched DispatchedByExpert EPHandle ElasticBuffer EventHandle EventOverlap Gathered
        Handle HybridEPBuffer LowLatencyCombined LowLatencyDispatched LowLatencyHandle Moves
        PeerDied PeerError PeerInputError PeerLeft PeerTimeout Permuted Prepared PreparedRows
        Replicas SharedMemoryError TokenyardError __version__ local_group merge_traces
        moe_align_block_size per_token_cast_back per_token_cast_to_fp8 permute rearrange record
        topk_idx_t trace unpermute warm_up
    """,
    "tokenyard.nn": """
        Experts GradScaler MoE Router RouterConfig Share SharedExpert accept_gradients
        auxiliary_losses average_expert_gradients checkpoint_state clip_grad_norm_
        expert_parameters functional get_grad_norm named_expert_parameters prepare_for_ddp
        rebalance share_experts sum_replica_gradients update_biases
    """,
    "tokenyard.testing": """
        Cluster Exited Processes ROUTINGS RankFailed VirtualRun assert_same fake_experts layout_of
        numbered_tokens poisoned routing run_processes run_virtual why_no_cluster
    """,
    "tokenyard.integrations.transformers": """
        TokenyardEP expert_parallel experts_forward from_pretrained prepare_trainer
        save_pretrained
    """,
}


@pytest.mark.parametrize("module", PUBLIC)
def test_names_that_users_import_stay(module: str) -> None:
    if module.endswith("transformers"):
        pytest.importorskip("transformers")
    found = importlib.import_module(module)
    names = PUBLIC[module].split()
    assert sorted(found.__all__) == sorted(names)
    assert all(getattr(found, name) is not None for name in names)


def test_public_names_are_there() -> None:
    for name in tokenyard.__all__:
        assert getattr(tokenyard, name) is not None
    assert set(tokenyard.__all__) <= set(dir(tokenyard))
    with pytest.raises(AttributeError, match="module 'tokenyard' has no attribute 'Bufer'"):
        _ = tokenyard.Bufer


def test_one_version_number() -> None:
    root = Path(__file__).parents[2]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", tokenyard.__version__)
    texts = [path for path in root.rglob("*.toml") if ".ci" not in path.parts]
    assert texts
    for path in texts:
        text = path.read_text().replace(f"tokenyard=={tokenyard.__version__}", "")  # `check_pin`
        assert tokenyard.__version__ not in text, f"{path} repeats the version"
