"""Every wrapper that is tested, which is the table of docs/guide/training.md.

python -m tests.cases.wrappers.table  # prints the table
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    wrapper: str
    how: str  # what a user writes
    within: float = 1e-5  # of one process: every loss, every parameter after the last step
    because: str = ""  # why that is more than 1e-5
    outcome: str = ""  # where it is refused: in which words


# With nn.MoE, on 2 ranks: tests/wrappers/test_layer.py
LAYER = {
    "ddp": Case(
        wrapper="DistributedDataParallel",
        how="`prepare_for_ddp(model)` before it",
    ),
    "ddp_unused": Case(
        wrapper="DistributedDataParallel, `find_unused_parameters`",
        how="as above",
    ),
    "ddp_no_sync": Case(
        wrapper="DistributedDataParallel, `no_sync` for accumulation",
        how="as above",
    ),
    "fsdp": Case(
        wrapper="FSDP2",
        how="`fully_shard(model, ignored_params=expert_parameters(model))`, "
        "then `average_expert_gradients(model)`",
    ),
    "fsdp_layers": Case(
        wrapper="FSDP2, each layer and the root",
        how="as above, with `ignored_params` for each call",
    ),
    "fsdp_bfloat16": Case(
        wrapper="FSDP2, `MixedPrecisionPolicy(bfloat16)`",
        how="as above; experts stay in float32 and compute in bfloat16",
        within=1e-2,
        because="bfloat16 keeps 8 bits, and sums over ranks are made in another order",
    ),
    "ddp_zero": Case(
        wrapper="DistributedDataParallel, ZeroRedundancyOptimizer",
        how="as above; it gets dense parameters alone, and experts another optimiser",
    ),
    "fsdp_offload": Case(
        wrapper="FSDP2, `CPUOffloadPolicy`",
        how="as above; `pin_memory=False` where there is no GPU",
    ),
}

# Compiled, on sizes that change from step to step: (backend, num_worst_tokens, wrapper)
COMPILED = {
    ("aot_eager", 64, "ddp"): Case(
        wrapper="torch.compile, aot_eager, DistributedDataParallel",
        how="`MoE(num_worst_tokens=n)`, `torch.compile(ddp, dynamic=True)`",
    ),
    ("aot_eager", 0, "ddp"): Case(
        wrapper="the same without `num_worst_tokens`",
        how="graphs break where sizes come from values",
    ),
    ("aot_eager", 64, "fsdp"): Case(
        wrapper="torch.compile, aot_eager, FSDP2",
        how="`fully_shard` first",
    ),
    ("aot_eager", 64, "compiled_ddp"): Case(
        wrapper="DistributedDataParallel around a compiled model",
        how="`prepare_for_ddp` of the model, compiled or not",
    ),
    ("inductor", 64, "ddp"): Case(
        wrapper="torch.compile, inductor, DistributedDataParallel",
        how="as with aot_eager",
    ),
    ("inductor", 0, "ddp"): Case(
        wrapper="the same without `num_worst_tokens`, inductor",
        how="as with aot_eager",
    ),
}

# Two stages of two ranks each: (schedule, what averages dense gradients)
PIPELINE = {
    ("gpipe", "ddp"): Case(
        wrapper="torch.distributed.pipelining, `ScheduleGPipe`, a stage in DistributedDataParallel",
        how="a Buffer and a `process_group` of each stage's ranks; `input_args` and `output_args`; "
        "`scale_grads=False`, and the loss divided by the micro-batches",
    ),
    ("1f1b", "ddp"): Case(
        wrapper="torch.distributed.pipelining, `Schedule1F1B`, likewise",
        how="as above",
    ),
    ("1f1b", "hand"): Case(
        wrapper="torch.distributed.pipelining, `Schedule1F1B`, a bare stage",
        how="as above, `average_expert_gradients(stage)`, dense gradients averaged by hand",
    ),
}

# With a model of transformers whose experts are spread, on 2 ranks: tests/wrappers/test_model.py
MODEL = {
    "ddp": Case(
        wrapper="DistributedDataParallel",
        how="`prepare_for_ddp(model)` before it",
    ),
    "fsdp": Case(
        wrapper="FSDP2, each layer and the root",
        how="`fully_shard(..., ignored_params=expert_parameters(model))` each time, then "
        "`average_expert_gradients(model)`",
    ),
    "accelerate": Case(
        wrapper="accelerate",
        how="`prepare_accelerator(accelerator, model)` before `accelerator.prepare`",
    ),
    "accelerate_bfloat16": Case(
        wrapper='accelerate, `mixed_precision="bf16"`',
        how="as above",
        within=5e-2,
        because="one process in bfloat16 is as far from itself in float32",
    ),
    "trainer": Case(
        wrapper="`Trainer`, clipping, evaluation, saving",
        how="`prepare_trainer(trainer)` before `train()`; `save_only_model=True`",
    ),
    "trainer_accumulated": Case(
        wrapper="`Trainer`, accumulated gradients, activation checkpointing, LoRA",
        how="as above",
    ),
    "trainer_lora": Case(
        wrapper="`Trainer` with LoRA on attention and on experts",
        how="as above, with `expert_parallel(get_peft_model(model, config), group)`",
    ),
    "lora_dense": Case(
        wrapper="LoRA on attention, DistributedDataParallel",
        how="`prepare_for_ddp(peft_model)` before it",
    ),
    "lora_experts_before": Case(
        wrapper="LoRA on experts, PEFT before `expert_parallel`",
        how="`target_parameters`; nothing is left for DistributedDataParallel: "
        "`average_expert_gradients(peft_model)`",
    ),
    "lora_experts_after": Case(
        wrapper="LoRA on experts, PEFT after `expert_parallel`",
        how="as above; each rank draws its own experts' adapters",
    ),
    "lora_accelerate": Case(
        wrapper="accelerate with LoRA on experts",
        how="`prepare_accelerator(accelerator, peft_model)`",
    ),
}

_FULLY_SHARD = "want fully_shard(model, ignored_params=expert_parameters(model))"
_COPIES = "whose gradients nobody sums: want a placement without copies, or the adapter merged"
_AVERAGE = "want tokenyard.nn.average_expert_gradients(model), or prepare_for_ddp(model), before"
_OTHER_OPTIMISER = (
    "want it for other parameters, and another optimiser for expert_parameters(model)"
)
_PREPARE = "want tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)"

# With nn.MoE, on 2 ranks: tests/wrappers/test_layer.py
REFUSED_LAYER = {
    "ddp": Case(
        wrapper="DistributedDataParallel, not prepared, compiled or not",
        how="it raises when it is made",
        outcome=_PREPARE,
    ),
    "ddp_compiled": Case(
        wrapper="DistributedDataParallel, not prepared, around a compiled model that was called",
        how="it raises when it is made",
        outcome=_PREPARE,
    ),
    "ddp_outside": Case(
        wrapper="DistributedDataParallel around a module that holds the prepared one",
        how="it raises when it is made",
        outcome=_PREPARE,
    ),
    "fsdp_all": Case(
        wrapper="FSDP2 without `ignored_params`",
        how="the first forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "fsdp_experts": Case(
        wrapper="FSDP2 of the experts module itself",
        how="the first forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "fsdp_compiled": Case(
        wrapper="torch.compile, FSDP2 without `ignored_params`",
        how="the first forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "fsdp_compiled_later": Case(
        wrapper="FSDP2 without `ignored_params`, of a model that was compiled and called",
        how="the next forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "fsdp_hybrid": Case(
        wrapper="FSDP2 with a mesh that copies over ranks, without `ignored_params`",
        how="the first forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "fsdp1": Case(
        wrapper="FullyShardedDataParallel (FSDP1) around experts",
        how="it raises when it is made",
        outcome=_FULLY_SHARD,
    ),
    "fsdp1_clipped": Case(
        wrapper="`nn.clip_grad_norm_` with FullyShardedDataParallel around a dense part",
        how="it raises",
        outcome="whose gradients do not say of what they are parts: want fully_shard",
    ),
    "replicate": Case(
        wrapper="torch's `replicate`",
        how="the first forward pass raises",
        outcome=_PREPARE,
    ),
    "replicate_sums": Case(
        wrapper="torch's `replicate`, with experts in `ignored_modules`, whose gradients are sums",
        how="the first forward pass raises",
        outcome=_PREPARE,
    ),
    "replicate_by_fsdp": Case(
        wrapper="torch's `replicate`, that of FSDP2",
        how="the first forward pass raises",
        outcome=_FULLY_SHARD,
    ),
    "ddp_sums": Case(
        wrapper="DistributedDataParallel, experts hidden, whose gradients are sums",
        how="the first forward pass raises",
        outcome=_AVERAGE,
    ),
    "ddp_sums_compiled": Case(
        wrapper="the same, compiled",
        how="the first forward pass raises",
        outcome=_AVERAGE,
    ),
    "fsdp_sums": Case(
        wrapper="FSDP2 without `average_expert_gradients`",
        how="the first forward pass raises",
        outcome=_AVERAGE,
    ),
    "fsdp_sums_compiled": Case(
        wrapper="the same, compiled",
        how="the first forward pass raises",
        outcome=_AVERAGE,
    ),
    "zero": Case(
        wrapper="ZeroRedundancyOptimizer that has experts",
        how="`step` raises",
        outcome=_OTHER_OPTIMISER,
    ),
    "local_sgd": Case(
        wrapper="PostLocalSGDOptimizer around one that has experts",
        how="`step` raises",
        outcome=_OTHER_OPTIMISER,
    ),
}

# With a model of transformers, on 2 ranks: tests/wrappers/test_model.py
REFUSED = {
    "ddp around peft": Case(
        wrapper="DistributedDataParallel around a PeftModel, not prepared",
        how="it raises when it is made",
        outcome=_PREPARE,
    ),
    "ddp without averages": Case(
        wrapper="DistributedDataParallel around a spread model, not prepared",
        how="the first forward pass raises",
        outcome=_AVERAGE,
    ),
    "float16": Case(
        wrapper='accelerate or `Trainer`, `mixed_precision="fp16"`',
        how="`prepare_accelerator` raises",
        outcome="which lets one rank skip a step alone: want mixed_precision='bf16'",
    ),
    "checkpoints": Case(
        wrapper="`Trainer`, checkpoints with the optimiser",
        how="`prepare_trainer` raises",
        outcome="Trainer writes the optimiser of rank 0 alone: want save_only_model=True",
    ),
    "best": Case(
        wrapper="`Trainer`, `load_best_model_at_end`",
        how="`prepare_trainer` raises",
        outcome="would load experts of all ranks into this one",
    ),
    "resume": Case(
        wrapper="`Trainer`, `resume_from_checkpoint`",
        how="`train` raises",
        outcome="would load experts of all ranks into this one",
    ),
    "save_state": Case(
        wrapper="`accelerator.save_state`, `accelerator.save_model`",
        how="they raise",
        outcome="would write this rank's experts as if they were all",
    ),
    "peft's save_pretrained": Case(
        wrapper="`model.save_pretrained` of a spread model or its adapter",
        how="it raises",
        outcome="want tokenyard.integrations.transformers.save_pretrained(model, path)",
    ),
    "checkpoint_state": Case(
        wrapper="`nn.checkpoint_state` of a model with LoRA on experts",
        how="it raises",
        outcome="want the adapter merged, or saved by save_pretrained",
    ),
    "copies": Case(
        wrapper="LoRA on experts that have copies, trained",
        how="`average_expert_gradients`, `prepare_for_ddp` raise",
        outcome=_COPIES,
    ),
    "copies' gradients": Case(
        wrapper="`nn.sum_replica_gradients` with LoRA on experts that have copies",
        how="it raises",
        outcome=_COPIES,
    ),
    "copies' norm": Case(
        wrapper="`nn.clip_grad_norm_`, `nn.get_grad_norm` with LoRA on experts that have copies",
        how="they raise",
        outcome=_COPIES,
    ),
    "experts alone": Case(
        wrapper="`accelerator.clip_grad_norm_` of some parameters",
        how="it raises, if experts are among them",
        outcome="want accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    ),
    "accelerate's fsdp": Case(
        wrapper="FSDP, DeepSpeed and others through accelerate or `Trainer`",
        how="`prepare_accelerator` raises",
        outcome="want DistributedDataParallel, accelerate's default, or fully_shard by hand",
    ),
    "same tokens": Case(
        wrapper='`expert_parallel(tokens="same")` with accelerate or `Trainer`',
        how="`prepare_accelerator` raises",
        outcome="accelerate gives each rank its own",
    ),
    "no environment": Case(
        wrapper="accelerate or `Trainer` on fewer processes than the experts",
        how="`prepare_accelerator` raises",
        outcome="and the environment that torchrun or accelerate launch makes",
    ),
}


# What a training does besides: what becomes of it, and the test, by its file in tests.
OTHERS = [
    ("optimisers", "[each](optimisers.md)", "nn/test_optimisers.py::test_a_row_of_the_table"),
    (
        "`nn.clip_grad_norm_` under DistributedDataParallel and FSDP2",
        "works",
        "nn/test_clipping.py::test_clipped_training_is_that_of_one_rank",
    ),
    (
        "`nn.clip_grad_norm_` with `DistributedConfig`, every layout",
        "works",
        "integrations/test_transformers_distributed.py::test_clipping",
    ),
    (
        "`Trainer` with `DistributedConfig`, clipping",
        "works; accelerate refuses `tp_size` on CPUs",
        "integrations/test_transformers_distributed.py::test_trainer_clips",
    ),
    (
        "`torch.nn.utils.clip_grad_norm_` with experts",
        "refused by the optimiser's step",
        "nn/test_clipping.py::test_torchs_own_clipping_is_refused",
    ),
    (
        "`torch.nn.utils.clip_grad_value_`, and whatever else changes gradients alike on all ranks",
        "works with `nn.accept_gradients(model)`, is refused by the optimiser's step without",
        "nn/test_scaling.py::test_what_was_meant_is_accepted",
    ),
    (
        "float16 with `nn.GradScaler`",
        "works",
        "nn/test_scaling.py::test_all_ranks_skip_the_step_of_one",
    ),
    (
        "float16 with `torch.amp.GradScaler`",
        "refused by the optimiser's step; a rank that skips it meets ranks that have left",
        "nn/test_scaling.py::test_torch_s_own_is_refused",
    ),
    ("`torch.autocast(bfloat16)`", "works", "nn/test_training.py::test_autocast"),
    ("parameters in bfloat16", "works", "nn/test_moe.py::test_bfloat16"),
    (
        "`model.to(bfloat16)`: the router's bias and load stay in float32",
        "works",
        "nn/test_training.py::test_bias_and_load_stay_in_float32",
    ),
    (
        "bfloat16 rows with experts in float32",
        "works",
        "nn/test_training.py::test_bfloat16_rows_with_float32_experts",
    ),
    (
        "quantised experts of transformers",
        "refused by `expert_parallel`",
        "integrations/test_transformers.py::test_says_what_is_wrong",
    ),
    (
        '`device="meta"`, `to_empty`, `reset_parameters`',
        "works",
        "nn/test_training.py::test_a_layer_that_gets_its_memory_later",
    ),
    (
        "activation checkpointing, `use_reentrant=False`",
        "works",
        "nn/test_moe.py::test_activation_checkpointing",
    ),
    (
        "activation checkpointing with a balance, reentrant too",
        "works, by owner",
        "nn/test_share_experts.py::test_what_is_computed_again_goes_by_owner_at_once",
    ),
    (
        "activation checkpointing, reentrant, with an auxiliary loss",
        "refused by `auxiliary_losses`",
        "nn/test_training.py::test_an_auxiliary_loss_without_its_gradient_is_refused",
    ),
    (
        "checkpoints on another number of ranks",
        "works",
        "nn/test_parallel.py::test_a_checkpoint_goes_on_on_another_number_of_ranks",
    ),
    (
        "`nn.rebalance`, with copies and the optimiser's states",
        "works",
        "nn/test_rebalance.py::test_training_goes_on_as_on_one_rank",
    ),
    (
        "`nn.rebalance` of a model of transformers",
        "works",
        "integrations/test_transformers.py::test_experts_move_while_a_model_is_trained",
    ),
    (
        '`nn.rebalance` with `tokens="same"`',
        "refused on all ranks",
        "integrations/test_transformers.py::test_experts_of_the_same_tokens_stay",
    ),
    (
        "`nn.rebalance` of what belongs to no single expert",
        "refused on all ranks",
        "nn/test_rebalance.py::test_what_cannot_move_raises_on_all_ranks_and_changes_nothing",
    ),
    (
        "`nn.rebalance` with a placement of other experts",
        "refused on all ranks",
        "nn/test_moving.py::test_a_placement_that_does_not_fit_changes_nothing",
    ),
    (
        "`nn.rebalance` that fails in the middle",
        "nothing has changed, on any rank",
        "nn/test_moving.py::test_an_error_in_the_middle_changes_nothing",
    ),
    (
        "`nn.rebalance` in inference mode",
        "works",
        "nn/test_moving.py::test_what_moved_in_inference_mode_can_be_trained",
    ),
    (
        "another module of the Buffer after `nn.rebalance`, an average of the weights too",
        "refused on all ranks, until it was moved",
        "nn/test_moving.py::test_a_module_that_was_left_behind_raises_until_it_follows",
    ),
    (
        "the same, compiled",
        "refused on all ranks, until it was moved",
        "nn/test_moving.py::test_compiled_graphs_look_too",
    ),
    (
        "`load_state_dict` of another placement",
        "refused",
        "nn/test_moving.py::test_a_state_dict_of_other_experts_is_refused",
    ),
    (
        "checkpoints with several copies on a rank",
        "works",
        "nn/test_checkpoint.py::test_every_copy_on_a_rank_is_loaded",
    ),
    (
        "checkpoints with ranks without experts",
        "works",
        "nn/test_checkpoint.py::test_wherever_experts_lay_when_they_were_saved_and_loaded",
    ),
    (
        "`nn.sum_replica_gradients`",
        "works",
        "nn/test_rebalance.py::test_copies_stay_equal_to_the_bit",
    ),
    (
        "`nn.sum_replica_gradients` beside a rank without experts",
        "works",
        "nn/test_moving.py::test_gradients_of_copies_beside_a_rank_without_slots",
    ),
]

LAYER_FILE, MODEL_FILE = "wrappers/test_layer.py", "wrappers/test_model.py"
_TESTS: list[tuple[Mapping[Any, Case], str]] = [
    (LAYER, "test_twenty_steps"),
    (COMPILED, "test_twenty_compiled_steps"),
    (PIPELINE, "test_twenty_steps_in_stages"),
    (MODEL, "test_twenty_steps"),
    (REFUSED_LAYER, "test_wrappers_that_take_experts_are_refused"),
    (REFUSED, "test_what_is_refused"),
]


def name_of_test(cases: Mapping[Any, Case], key: Any) -> str:
    """The name of the case's test, as pytest has it."""
    name = next(name for one, name in _TESTS if one is cases)
    kind = "-".join(map(str, key)) if isinstance(key, tuple) else key
    return f"`{name}[{kind}]`" if cases is not REFUSED else f"`{name}`"


def table() -> str:
    """In Markdown, as docs/guide/training.md has it."""
    parts: dict[str, list[Mapping[Any, Case]]] = {
        f"with `nn.MoE` (`{LAYER_FILE}`)": [LAYER, COMPILED, PIPELINE],
        f"with a model of transformers (`{MODEL_FILE}`)": [MODEL],
    }
    lines = []
    for title, kinds in parts.items():
        lines += [f"| {title} | how | within | test |", "|---|---|---|---|"]
        for cases in kinds:
            for key, case in cases.items():
                within = f"{case.within:g}" + (f": {case.because}" if case.because else "")
                lines.append(
                    f"| {case.wrapper} | {case.how} | {within} | {name_of_test(cases, key)} |"
                )
        lines.append("")
    lines += ["| refused | where | in the words | test |", "|---|---|---|---|"]
    for cases in (REFUSED_LAYER, REFUSED):
        for key, case in cases.items():
            lines.append(
                f"| {case.wrapper} | {case.how} | {case.outcome} | {name_of_test(cases, key)} |"
            )
    lines += ["", "| besides | | test |", "|---|---|---|"]
    lines += [f"| {what} | {outcome} | `{test}` |" for what, outcome, test in OTHERS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
