"""transformers' Trainer with a model whose experts are spread."""

from __future__ import annotations

from typing import Any

from tokenyard.comm.together import together
from tokenyard.integrations.accelerate import prepare_accelerator
from tokenyard.integrations.transformers.saving import gather_state, refuse_to_save_a_part
from tokenyard.validate import require


def prepare_trainer(trainer: Any) -> None:
    """Call it before `trainer.train()`, on all ranks, with a model of `expert_parallel`.

    Gradients are then averaged and clipped (`max_grad_norm`) with the experts of all ranks, and
    `save_model` and checkpoints hold the whole model, or the whole adapter of a PeftModel. Trainer
    writes the optimiser of rank 0 alone, so that it cannot resume: checkpoints are refused unless
    `save_only_model=True`.
    """
    args, model = trainer.args, trainer.model
    require(
        args.save_strategy == "no" or args.save_only_model,
        f"save_strategy is {args.save_strategy.value!r}, and Trainer writes the optimiser of rank "
        "0 alone: want save_only_model=True, or save_strategy='no'",
    )
    require(
        not args.load_best_model_at_end,
        "load_best_model_at_end is True, and Trainer would load experts of all ranks into this "
        "one: want False",
    )
    prepare_accelerator(trainer.accelerator, model)
    refuse_to_save_a_part(model)

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        state = gather_state(model)
        with together(model.tokenyard_buffer.group, "save_model"):
            if state is not None:
                trainer._save(output_dir, state_dict=state)
        if args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)

    def load_from_checkpoint(path: str, model: Any = None) -> None:
        raise RuntimeError(
            f"resume_from_checkpoint={path!r} would load experts of all ranks into this one: want "
            "tokenyard.integrations.transformers.from_pretrained(..., path), and train() without it"
        )

    trainer.save_model = save_model
    trainer._load_from_checkpoint = load_from_checkpoint
