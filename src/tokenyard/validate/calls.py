"""Checks of what a call is given: rows, routing, layouts, handles, biases, events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.replicas import PhysicalPlacement, Replicas
from tokenyard.results import Handle, handle_of
from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.topology import Placement
from tokenyard.types import (
    ROW_DTYPES,
    SCALE_DTYPES,
    Layout,
    Origin,
    topk_idx_t,
)
from tokenyard.validate.tensors import CPU, NOT_PLAIN, contiguous, lies_at, target, tensor
from tokenyard.validate.values import kind, require

# What combine can sum. FP8 rows have scales, and a sum of them has none.
SUMMABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def combine_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the rows that come back: that of x, or bfloat16 where x was quantised."""
    return dtype if dtype in SUMMABLE else torch.bfloat16


ID_DTYPES = (torch.int32, torch.int64)
_FEW = 100  # numbers that Python compares sooner than a tensor's method is called


def rows(
    what: str,
    value: Any,
    *,
    num_rows: int | str,
    dtypes: Sequence[torch.dtype],
    after: EventHandle | None = None,
    device: torch.device = CPU,
) -> Tensor:
    shape = (num_rows, "hidden")
    value = tensor(what, value, shape=shape, dtypes=dtypes, device=device, after=after)
    if value.shape[1] == 0:
        raise ValueError(f"{what} has hidden size 0, want at least 1")
    return contiguous(value, after)


def dispatched(
    x: Any, after: EventHandle | None = None, device: torch.device = CPU
) -> tuple[Tensor, Tensor | None]:
    """x, or the pair (x, scales) of quantised rows."""
    if not isinstance(x, tuple):
        return rows("x", x, num_rows="tokens", dtypes=ROW_DTYPES, after=after, device=device), None
    require(len(x) == 2, f"x is a tuple of {len(x)}, want a tensor or (x, scales)")
    values = rows("x[0]", x[0], num_rows="tokens", dtypes=ROW_DTYPES, after=after, device=device)
    scales = tensor(
        "x[1] (scales)",
        x[1],
        shape=[values.shape[0], "scales"],
        dtypes=SCALE_DTYPES,
        device=device,
        after=after,
    )
    require(scales.shape[1] > 0, "x[1] (scales) has no columns, want at least 1 a row")
    return values, contiguous(scales, after)


def topk_idx(value: Any, num_tokens: int | str, device: torch.device = CPU) -> Tensor:
    # What is plainly right passes at once: the checks below take as long as a small layout.
    if (
        device == CPU
        and lies_at(value, 2, topk_idx_t) != NOT_PLAIN
        and value.numel()
        and (num_tokens == "tokens" or num_tokens == value.shape[0])
    ):
        return value
    return topk_ids("topk_idx", value, num_tokens=num_tokens, device=device, dtypes=(topk_idx_t,))


def topk_ids(
    what: str,
    value: Any,
    *,
    num_tokens: int | str,
    device: torch.device | None,
    dtypes: Sequence[torch.dtype] = ID_DTYPES,
) -> Tensor:
    """Expert ids as int32 or int64; on any device if `device` is None."""
    shape = (num_tokens, "topk")
    value = tensor(what, value, shape=shape, dtypes=dtypes, device=device)
    require(value.shape[1] > 0, f"{what} has top-k 0, want at least 1")
    return value.contiguous()


def topk_weights(
    value: Any,
    shape: Sequence[int | str],
    after: EventHandle | None = None,
    device: torch.device = CPU,
) -> Tensor:
    dtypes = (torch.float32,)
    value = tensor("topk_weights", value, shape=shape, dtypes=dtypes, device=device, after=after)
    require(value.shape[1] > 0, "topk_weights has top-k 0, want at least 1")
    return contiguous(value, after)


def topk(
    idx: Any, weights: Any, num_tokens: int, device: torch.device = CPU
) -> tuple[Tensor | None, Tensor | None]:
    require(
        (idx is None) == (weights is None),
        f"topk_{'weights' if idx is None else 'idx'} is given alone, want topk_idx and "
        "topk_weights together or neither",
    )
    if idx is None:
        return None, None
    idx = topk_idx(idx, num_tokens, device)
    return idx, topk_weights(weights, idx.shape, device=device)


def layout(
    per_rank: Any,
    in_rank: Any,
    per_expert: Any,
    *,
    num_tokens: int,
    num_ranks: int,
    device: torch.device = CPU,
) -> Layout | None:
    """The layout that the user passed in parts; None if he passed none."""
    parts = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    missing = [what for what, part in parts.items() if part is None]
    if len(missing) == len(parts):
        return None
    require(
        not missing,
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} None, want "
        f"{', '.join(parts)} together, or none of them and num_experts",
    )
    ints = (torch.int32,)
    counts = tensor(
        "num_tokens_per_expert", per_expert, shape=["experts"], dtypes=ints, device=device
    )
    require(counts.shape[0] > 0, "num_tokens_per_expert is empty, want at least one expert")
    numbers = counts.tolist()
    if min(numbers) < 0:
        expert = next(place for place, number in enumerate(numbers) if number < 0)
        raise ValueError(f"num_tokens_per_expert[{expert}] is {counts[expert]}, want at least 0")
    return Layout(
        num_tokens_per_rank=tensor(
            "num_tokens_per_rank", per_rank, shape=[num_ranks], dtypes=ints, device=device
        ),
        num_tokens_per_node=None,
        num_tokens_per_expert=counts,
        is_token_in_rank=tensor(
            "is_token_in_rank",
            in_rank,
            shape=[num_tokens, num_ranks],
            dtypes=(torch.bool,),
            device=device,
        ).contiguous(),
    )


def layout_fits(value: Layout, topk_idx_TK: Tensor | None, num_experts: Any) -> None:
    """Compare the layout with what was passed beside it."""
    counted = value.num_tokens_per_expert.shape[0]
    require(
        num_experts is None or num_experts == counted,
        f"num_experts is {num_experts}, want {counted}, the length of num_tokens_per_expert",
    )
    if topk_idx_TK is not None and topk_idx_TK.numel():
        low, high = _range(topk_idx_TK)
        if low < -1 or high >= counted:
            outside = (topk_idx_TK < -1) | (topk_idx_TK >= counted)
            raise bad_expert(topk_idx_TK, int(outside.flatten().nonzero()[0]), counted)


def _range(values: Tensor) -> tuple[int, int]:
    if values.numel() <= _FEW:
        numbers = values.flatten().tolist()
        return min(numbers), max(numbers)
    low, high = torch.aminmax(values)
    return int(low), int(high)


def same_counts(value: Layout) -> None:
    """Compare what was passed of a layout with itself."""
    told = value.num_tokens_per_rank.tolist()
    counted = value.is_token_in_rank.sum(0).tolist()
    if told != counted:
        raise ValueError(
            f"num_tokens_per_rank is {told}, want {counted}, the columns of is_token_in_rank "
            "added up"
        )


def too_few_rows(num_worst_tokens: int, num_rows: int) -> ValueError:
    want = f"want at least the {num_rows} that arrive"
    return ValueError(f"num_worst_tokens is {num_worst_tokens}, {want}")


def bad_expert(
    topk_idx_TK: Tensor, place: int, num_experts: int, what: str = "topk_idx"
) -> ValueError:
    token, k = divmod(place, topk_idx_TK.shape[1])
    return ValueError(
        f"{what}[{token}, {k}] is {topk_idx_TK[token, k].item()}, want -1..{num_experts - 1} "
        f"(num_experts={num_experts})"
    )


def handle(value: Any, origin: Origin) -> Handle:
    """A handle that a Buffer of this origin can use. It may come as the tuple of its fields."""
    known = handle_of(value)
    if known is None:
        want = f"handle is {kind(value)}, want the handle that dispatch returned"
        if isinstance(value, (tuple, list)):
            raise ValueError(
                f"{want}, or all its fields as they came out of it: its first tensor is of no "
                "handle that is still alive"
            )
        more = ", or topk_idx=, topk_weights= and num_experts= by keyword"
        raise ValueError(want + more * isinstance(value, Tensor))
    require(
        known.origin.buffer != origin.buffer
        or known.origin.rank != origin.rank
        or known.origin.place == origin.place,
        f"handle is of dispatch call {known.call}, before the Buffer was rebalanced, want one of "
        "a dispatch since then",
    )
    require(
        known.origin is origin or known.origin.serves(origin),
        f"handle is of dispatch call {known.call} of another rank, or of a Buffer with another "
        "group, placement, transport or nodes, want one of a Buffer like this one, returned here",
    )
    return known


def no_routing(beside: Sequence[str]) -> None:
    """`beside` names what was given together with a handle."""
    if beside:
        raise ValueError(f"{', '.join(beside)} given with a handle, which has the routing already")


def same_tokens(x_TD: Tensor, num_tokens: int) -> None:
    if x_TD.shape[0] != num_tokens:
        raise ValueError(f"x has {x_TD.shape[0]} tokens, want {num_tokens}, those of the handle")


def biases(value: Any, like: Tensor, num_tokens: int, after: EventHandle | None) -> list[Tensor]:
    """The biases as a list: given as None, a tensor, or a pair of tensors."""
    if value is None:
        return []
    named = {"bias": value}
    if isinstance(value, tuple):
        require(len(value) <= 2, f"bias is a tuple of {len(value)}, want at most 2 tensors")
        named = {f"bias[{i}]": one for i, one in enumerate(value)}
    shape, dtypes, device = (num_tokens, like.shape[1]), (like.dtype,), like.device
    return [
        contiguous(tensor(what, one, shape=shape, dtypes=dtypes, device=device, after=after), after)
        for what, one in named.items()
        if one is not None
    ]


def placement(
    value: Any, num_ranks: int, device: torch.device = CPU, no_copies: str = ""
) -> Placement:
    """The rank of each expert, or Replicas, unless `no_copies` says why they cannot be."""
    if isinstance(value, Replicas):
        require(not no_copies, no_copies)
        require(
            value.num_ranks == num_ranks,
            f"placement has slots of {value.num_ranks} ranks, want {num_ranks}, those of the group",
        )
        return PhysicalPlacement.of(value, device)
    return Placement(owners(value, num_ranks).to(device), num_ranks)


def owners(value: Any, num_ranks: int) -> Tensor:
    """[E] int32: the rank of each expert."""
    value = tensor("placement", value, shape=["experts"], dtypes=(torch.int32, torch.int64))
    require(value.shape[0] > 0, "placement is empty, want the rank of at least one expert")
    outside = ((value < 0) | (value >= num_ranks)).nonzero()
    if len(outside):
        expert = int(outside[0])
        raise ValueError(
            f"placement[{expert}] is {int(value[expert])}, want a rank, 0..{num_ranks - 1}"
        )
    return value.to(torch.int32, copy=True, memory_format=torch.contiguous_format)


def previous_event(value: Any) -> EventHandle | None:
    """The event that must come first; None if it is over. If it failed, raise its error."""
    if value is None:
        return None
    if not isinstance(value, EventOverlap):
        raise ValueError(f"previous_event is {kind(value)}, want an EventOverlap")
    if value.event is None or not value.event.is_over:
        return value.event
    value.event.current_stream_wait()
    return None


def out(value: Any, num_tokens: int, like: Tensor, read: Sequence[Tensor] = ()) -> Tensor:
    """Where sums of rows like these are to be written. It shares no memory with what is read."""
    shape, dtypes = (num_tokens, like.shape[-1]), (like.dtype,)
    given = target("out", value, shape=shape, dtypes=dtypes, device=like.device)
    require(given.is_contiguous(), "out is not contiguous, want it so")
    if any(overlap(given, one) for one in read):
        raise ValueError("out shares memory with what is to be summed, want memory of its own")
    return given


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    begin, first = one.data_ptr(), other.data_ptr()
    return first < begin + one.nbytes and begin < first + other.nbytes
