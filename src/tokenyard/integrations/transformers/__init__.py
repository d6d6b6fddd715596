"""Expert parallelism for the MoE models of Hugging Face transformers.

By one word of transformers' own config, with its plans, FSDP2, loading and saving:

    import tokenyard.integrations.transformers

    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=4, ep_size=4, ep_implementation="tokenyard"))

Or in one call, for models that are in memory already, for experts that move, and for families that
transformers has no plan for:

    model = expert_parallel(MixtralForCausalLM.from_pretrained(path), dist.group.WORLD)
    model = from_pretrained(MixtralForCausalLM, path, dist.group.WORLD)  # never holds the rest

Each rank then keeps its own slice of every stacked expert parameter; everything else of the model
stays whole on every rank. It is for models whose experts transformers runs through its registry of
expert functions (`use_experts_implementation`), Mixtral, Qwen3-MoE and DeepSeek-V3 among them, and
those of `adapters`, such as Llama 4. On CPU.

Ranks either have tokens of their own (data parallel training, one prompt a rank), or all have the
same tokens (one prompt for all). In the second case nothing needs to be sent to the experts: a rank
runs its experts on the tokens that chose them, and the partial sums are added up over ranks.
"""

from tokenyard.integrations.transformers.experts import experts_forward
from tokenyard.integrations.transformers.implementation import TokenyardEP
from tokenyard.integrations.transformers.loading import from_pretrained
from tokenyard.integrations.transformers.saving import save_pretrained
from tokenyard.integrations.transformers.spread import expert_parallel
from tokenyard.integrations.transformers.training import prepare_trainer

__all__ = [
    "TokenyardEP",
    "expert_parallel",
    "experts_forward",
    "from_pretrained",
    "prepare_trainer",
    "save_pretrained",
]
