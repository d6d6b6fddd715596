"""transformers' own expert parallelism, with `ep_implementation="tokenyard"`, and one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="transformers' own loading wants accelerate")

from safetensors.torch import load_file
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from tests.cases.clock import scaled
from tests.cases.lanes import at_night
from tests.cases.processes import Pools
from tests.cases.transformers import distributed as jobs
from tests.cases.transformers import families, moe
from tokenyard.testing import Exited, Processes, assert_same

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
LAYOUTS = pytest.mark.parametrize(
    "layout", at_night(jobs.LAYOUTS, gate=("one batch, 4", "a batch for two, sharded experts"))
)
# Those that transformers tests its expert parallelism with, by the names of their folders.
TYPES = [
    "cohere2_moe",
    "deepseek_v4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm_moe_dsa",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen4_exp",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved"))
    moe.whole_model("qwen3_moe", num_key_value_heads=4).save_pretrained(path)
    return path


def ranks_of(processes: Pools, sizes: dict[str, int]) -> Processes:
    return processes(sizes.get("fsdp_size", 1) * sizes.get("tp_size", 1))


@LAYOUTS
def test_training(processes: Pools, saved: str, layout: str) -> None:
    sizes = jobs.LAYOUTS[layout]
    ranks_of(processes, sizes).run(jobs.train, saved, sizes)


CLIPPED = pytest.mark.parametrize("layout", at_night(jobs.LAYOUTS, gate=("batches of their own",)))


@CLIPPED
def test_clipping(processes: Pools, saved: str, layout: str) -> None:
    """By ours: the norm has the same bits on all ranks. torch's takes one mesh alone."""
    sizes = jobs.LAYOUTS[layout]
    results = ranks_of(processes, sizes).run(jobs.clip, saved, sizes)
    assert len({norm for norm, _ in results}) == 1
    why = "must have the same mesh" if "fsdp_size" in sizes else "mixed torch.Tensor and DTensor"
    for _, said in results:
        assert why in said


@CLIPPED
def test_trainer_clips(processes: Pools, saved: str, tmp_path: Path, layout: str) -> None:
    sizes = jobs.LAYOUTS[layout]
    for said in ranks_of(processes, sizes).run(jobs.clip_by_trainer, saved, sizes, str(tmp_path)):
        # accelerate takes no layout with tp_size on CPUs.
        assert ("but got DistributedType.MULTI_CPU" in said) == ("tp_size" in sizes)


TWO = pytest.mark.parametrize(
    "layout", at_night(["batches of their own", "one batch"], gate=("batches of their own",))
)


@TWO
def test_generation_and_bfloat16(processes: Pools, saved: str, layout: str) -> None:
    processes(2).run(jobs.infer, saved, jobs.LAYOUTS[layout])


@pytest.mark.parametrize("layout", at_night(["batches of their own", "one batch"], ("one batch",)))
def test_compiled(processes: Pools, saved: str, layout: str) -> None:
    processes(2).run(jobs.compile_it, saved, jobs.LAYOUTS[layout])


@TWO
def test_saving(processes: Pools, saved: str, tmp_path: Path, layout: str) -> None:
    processes(2).run(jobs.save, saved, jobs.LAYOUTS[layout], str(tmp_path))
    want, got = (load_file(Path(one, "model.safetensors")) for one in (saved, tmp_path))
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert_same(got[name], one)


@pytest.mark.parametrize(
    "layout, num_meshes", [("one batch, 4", 1), ("a batch for two, all experts", 2)]
)
def test_a_model_has_a_buffer_for_each_mesh(
    processes: Pools, saved: str, layout: str, num_meshes: int
) -> None:
    got = processes(4).run(jobs.share_a_buffer, saved, jobs.LAYOUTS[layout])
    assert got == 4 * [[num_meshes, 2 * num_meshes, 0]]


def qwen3_moe() -> Any:
    return Qwen3MoeExperts(Qwen3MoeConfig(num_experts=4, hidden_size=16, moe_intermediate_size=12))


def gpt_oss() -> Any:
    """Biases, transposed, and a gate of its own."""
    return GptOssExperts(GptOssConfig(num_local_experts=4, hidden_size=16, intermediate_size=12))


def nemotron_h() -> Any:
    """No gate."""
    return NemotronHExperts(
        NemotronHConfig(n_routed_experts=4, hidden_size=16, moe_intermediate_size=12)
    )


def muse_like() -> Any:
    """A norm after each expert."""
    experts: Any = qwen3_moe()
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.RMSNorm(16)
    return experts


@pytest.mark.parametrize("all_to", [None, 2], ids=["all-ranks", "one-rank"])
@pytest.mark.parametrize("same", [False, True], ids=["own", "same"])
@pytest.mark.parametrize("way", ["grouped_mm", "somebody's"])
@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss, nemotron_h, muse_like])
def test_kinds_of_experts(
    processes: Pools, make: Any, way: str, same: bool, all_to: int | None
) -> None:
    torch.manual_seed(3)
    experts = make()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    processes(2).run(jobs.run_kind, experts, way, same, all_to)


@pytest.mark.parametrize("tied", at_night([False, True], (True,)), ids=["untied", "tied"])
@pytest.mark.parametrize("num_ranks", at_night([2, 4], gate=(4,)))
@pytest.mark.parametrize(
    "family",
    at_night(TYPES, gate=("glm4_moe",)),
)
def test_types_that_transformers_tests(
    processes: Pools, tmp_path: Path, family: str, num_ranks: int, tied: bool
) -> None:
    model = families.tiny_model(family, tie_word_embeddings=tied)
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == tied
    model.save_pretrained(tmp_path, save_original_format=True)
    processes(num_ranks).run(jobs.forward_and_backward, str(tmp_path), family)


def test_a_rank_that_dies_while_a_model_is_trained(saved: str) -> None:
    with Processes(2, timeout=scaled(120)) as ranks:
        sizes = jobs.LAYOUTS["batches of their own"]
        answers = ranks.run(jobs.die, saved, sizes, may_die=True)
    assert isinstance(answers[1], Exited)
    kind, named, seconds = answers[0]
    assert (kind, named) == ("PeerDied", (1,))
    assert seconds < scaled(20)


@pytest.mark.slow
def test_the_example() -> None:
    path = ROOT / "examples" / "train_moe_transformers.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    out = subprocess.run(
        [*command, "--nproc-per-node", "4", path, "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=scaled(300),
        check=True,
    ).stdout
    steps = [line.split() for line in out.splitlines() if line.split()[0].isdigit()]
    assert len(steps) == 4
    for _, theirs, ours in steps:
        assert abs(float(theirs) - float(ours)) < 1e-4
    assert "tokenyard: " in out
