"""Fine-tune a small transformers MoE with Trainer and LoRA, its experts spread over all ranks.

python examples/finetune_lora.py --losses one_process.txt  # all experts in one
torchrun --nproc-per-node 2 examples/finetune_lora.py --plot lora.png --beside one_process.txt
torchrun --nproc-per-node 2 examples/finetune_lora.py --save adapter  # the whole adapter, as of one

LoRA is on attention and on the experts. The model is random and stays as it is; the adapters learn
to count in steps that differ from sequence to sequence. The batch of a step is the same whatever
the number of ranks, and so are the losses, but for rounding. It needs peft and accelerate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from tokenyard.integrations.transformers import expert_parallel, prepare_trainer

VOCABULARY, LENGTH, BATCH = 32, 12, 16  # sequences of a step, of all ranks
MODEL = MixtralConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.1,
)
LORA = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
)


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count on from anywhere, in steps of 1 to 4."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(0, VOCABULARY, (number, 1), generator=generator)
        step = torch.randint(1, 5, (number, 1), generator=generator)
        self.tokens = (first + step * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def fine_tune(num_steps: int, folder: str, save: str | None) -> list[float]:
    """The losses, of all ranks' sequences."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)  # all ranks begin with the same model and adapters
    model = get_peft_model(MixtralForCausalLM(MODEL), LORA)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH // num_ranks,
        max_steps=num_steps,
        learning_rate=1e-2,
        adam_epsilon=1e-5,
        logging_steps=1,
        train_sampling_strategy="sequential",  # else the ranks' number changes the order
        save_strategy="no",
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    if dist.is_initialized():
        model = expert_parallel(model, dist.group.WORLD)
    trainer = Trainer(model, arguments, train_dataset=Counting(BATCH * num_steps))
    if dist.is_initialized():
        prepare_trainer(trainer)
    trainer.train()
    if save:
        trainer.save_model(save)
    if dist.is_initialized():
        model.tokenyard_buffer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plot(curve: list[float], num_ranks: int, args: argparse.Namespace) -> None:
    """This run's losses, and above them how far those of `--beside` are from them."""
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(7, 5), height_ratios=(1, 3), layout="constrained"
    )
    steps = range(1, 1 + len(curve))
    bottom.plot(steps, curve, label=f"{num_ranks} ranks")
    for path in args.beside:
        name = Path(path).stem.replace("_", " ")
        other = [float(line) for line in Path(path).read_text().split()]
        bottom.plot(steps, other, linestyle="--", label=name)
        far = [abs(a - b) for a, b in zip(curve, other, strict=True)]
        top.plot(steps, far, label=f"{name}: at most {max(far):.1e}")
    top.set(
        ylabel="difference",
        title=f"Trainer and LoRA, {MODEL.num_local_experts} experts on {num_ranks} ranks",
    )
    bottom.set(xlabel="step", ylabel="loss", ylim=(0, None))
    top.margins(y=0.5)  # room for the legend
    top.set_visible(bool(args.beside))
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        if args.beside:
            axes.legend()
    figure.savefig(args.plot, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", metavar="FOLDER", help="the adapter, of all experts")
    parser.add_argument("--plot", metavar="FILE", help="the loss curve; needs matplotlib")
    parser.add_argument("--losses", metavar="FILE", help="the losses, a line each")
    parser.add_argument("--beside", metavar="FILE", nargs="*", default=[], help="others to draw")
    args = parser.parse_args()
    rank, num_ranks = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        curve = fine_tune(args.steps, folder, args.save)
    if rank == 0:
        print(f"loss {curve[0]:.4f} at step 1, {curve[-1]:.4f} at step {args.steps}")
        if args.losses:
            Path(args.losses).write_text("".join(f"{loss}\n" for loss in curve))
        if args.plot:
            plot(curve, num_ranks, args)
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
