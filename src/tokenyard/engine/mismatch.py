"""What ranks must agree on, how it is named to a reader, and the error that says they differ.

A term is named by its field of `Call`, whose words all ranks compare.
"""

from __future__ import annotations

from tokenyard.errors import CallMismatch
from tokenyard.types import OTHER_BUFFER, ROW_DTYPES, SCALE_DTYPES

# The calls that ranks make together. Their places in this tuple travel between ranks.
STAGES = (
    "Buffer",
    "dispatch",
    "cached dispatch",
    "combine",
    "all_gather",
    "low-latency dispatch",
    "low-latency combine",
    "dispatch by expert",
    "combine by expert",
    "barrier",
    "engram_write",
    "pp_set_config",
    "agrs_set_config",
    "rebalance",
    "balance",
    "share stack",
)

CASTS = ("use_fp8", "round_scale", "use_ue8m0")  # by the codes of `wire.fp8`; -1: none

_WORDS = {
    "stage": "what they call",
    "buffer": "the Buffer that they call",
    "number": "how many calls they made on this Buffer",
    "handle": "the handle (by the number of the call that made it)",
    "hidden": "hidden size",
    "dtype": "dtype of x",
    "num_scales": "scales a row",
    "scales_dtype": "dtype of the scales",
    "num_topk": "top-k",
    "num_experts": "num_experts",
    "num_channels": "channels (config.num_sms // 2)",
    "num_slots": "config.num_max_nvl_chunked_recv_tokens",
    "num_max": "num_max_dispatch_tokens_per_rank",
    "cast": "use_fp8, round_scale or use_ue8m0",
    "options": "transport=, ring memory, ranks_per_node=, placement=, balance= or low-latency mode",
    "tag": "tag",
}
# What else a digest stands for.
_OPTIONS = {"rebalance": "the placement", "share stack": "the shape of an expert, or its dtype"}


def differ(
    stage: str,
    term: str,
    mine: tuple[int, int],
    theirs: tuple[int, int],
) -> CallMismatch:
    """The error that this rank raises in `stage`. `mine` and `theirs` are (rank, value) pairs.

    >>> str(differ("combine", "stage", (0, 3), (1, 1)))
    'combine: ranks differ in what they call: combine on rank 0, dispatch on rank 1'
    """
    (rank, own), (other, their) = mine, theirs
    what = _OPTIONS.get(stage, _WORDS[term]) if term == "options" else _WORDS[term]
    return CallMismatch(
        f"{stage}: ranks differ in {what}: {_show(term, own, True)} on rank {rank}, "
        f"{_show(term, their, False)} on rank {other}",
        what=term,  # the same on all ranks: where values differ, each rank differs from some other
    )


def _show(term: str, value: int, is_own: bool) -> str:
    if term in ("buffer", "options"):  # digests, which mean nothing to a reader
        return "one" if is_own else "another"
    if value == -1:
        return "none"
    if term == "handle" and value >= OTHER_BUFFER:
        return "one of another Buffer"
    names = {
        "dtype": [str(one).removeprefix("torch.") for one in ROW_DTYPES],
        "scales_dtype": [str(one).removeprefix("torch.") for one in SCALE_DTYPES],
        "cast": CASTS,
        "stage": STAGES,
    }
    if term not in names:
        return str(value)
    known = names[term]
    return known[value] if 0 <= value < len(known) else "another"
