"""Every wrapper that is tested, which is the table of docs/guide/training.md.

python -m tests.cases.wrappers.table  # prints the table
"""

from __future__ import annotations

from dataclasses import dataclass


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

REFUSED = {
    "fsdp_all": Case(
        wrapper="FSDP2 without `ignored_params`",
        how="the first forward pass raises",
        outcome="want fully_shard(model, ignored_params=expert_parameters(model))",
    ),
    "ddp around peft": Case(
        wrapper="DistributedDataParallel around a PeftModel, not prepared",
        how="the first forward pass raises",
        outcome="want tokenyard.nn.prepare_for_ddp(model) before DistributedDataParallel(model)",
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


def table() -> str:
    """In Markdown, as docs/guide/training.md has it."""
    parts = {"with `nn.MoE`": [*LAYER.values(), *COMPILED.values(), *PIPELINE.values()]}
    parts["with a model of transformers"] = list(MODEL.values())
    lines = []
    for title, cases in parts.items():
        lines += [f"| {title} | how | within |", "|---|---|---|"]
        for case in cases:
            within = f"{case.within:g}" + (f": {case.because}" if case.because else "")
            lines.append(f"| {case.wrapper} | {case.how} | {within} |")
        lines.append("")
    lines += ["| refused | where | in the words |", "|---|---|---|"]
    lines += [f"| {case.wrapper} | {case.how} | {case.outcome} |" for case in REFUSED.values()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
