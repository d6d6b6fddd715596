"""Every check of what users pass in. Raises ValueError: what, got, wanted.

Messages are short; the engine adds the stage and the rank, and tells the other ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard.runtime.events import EventHandle, EventOverlap
from tokenyard.types import ROW_DTYPES, SCALE_DTYPES, Config, Handle, Layout, Route, topk_idx_t

# What combine can sum. FP8 rows have scales, and a sum of them has none.
SUMMABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Rows and counts are int32. Experts and SMs (two a channel) cost every call memory on every rank,
# so a slip of the keyboard must not reach an allocation.
MOST = 2**31 - 1
MOST_EXPERTS = 2**20
_MOST_SMS = 2**12
_FEW = 100  # numbers that Python compares sooner than a tensor's method is called

ID_DTYPES = (torch.int32, torch.int64)
CPU = torch.device("cpu")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind(value: Any) -> str:
    """
    >>> kind(None), kind(3), kind([])
    ('None', 'an int', 'a list')
    """
    if value is None:
        return "None"
    word = type(value).__name__
    return f"{'an' if word[0] in 'aeiouAEIOU' else 'a'} {word}"


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(name, dtypes))


def tensor(
    what: str,
    value: Any,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = CPU,
    after: EventHandle | None = None,
) -> Tensor:
    """A dense tensor of this shape, in which a word stands for any length: ["tokens", 8].

    Without a device it may be on any. It is read, if at all, after the event. On the path of every
    call, so messages are built only when they are needed.
    """
    if not isinstance(value, Tensor):
        raise not_a_tensor(what, value)
    form(what, value.shape, value.dtype, value.layout, shape=shape, dtypes=dtypes)
    if device is not None and value.device != device:
        raise ValueError(f"{what} is on device {value.device}, want {device}")
    if value.requires_grad:
        value = without_gradient(what, value)
    return held(what, value, after)


def held(what: str, value: Tensor, after: EventHandle | None = None) -> Tensor:
    """The tensor, or a copy of it if its memory does not hold what it means.

    Kernels read addresses. A tensor may be the negative of its memory, or have none: a wrapper
    around others, one that is traced, one whose storage was freed.
    """
    try:
        if value.data_ptr() and not value.is_neg():
            return value
    except RuntimeError:  # of torch.func's wrappers
        address(what, value)
    if not value.numel() or value.is_meta:  # which no kernel reads
        return value
    if not value.is_neg() and not value._is_zerotensor():
        address(what, value)
    if after is not None:
        after.current_stream_wait()
    return value.clone()


def target(
    what: str,
    value: Any,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device = CPU,
) -> Tensor:
    """A tensor to whose memory a result may be written."""
    checked = tensor(what, value, shape=shape, dtypes=dtypes, device=device)
    if checked.data_ptr() != value.data_ptr():
        raise ValueError(f"{what} is not what its memory holds, want a plain torch.Tensor")
    return checked


def address(what: str, value: Tensor) -> int:
    """Of a tensor that has elements."""
    try:
        found = value.data_ptr()
    except RuntimeError:  # of torch.func's wrappers
        found = 0
    if not found:
        raise ValueError(f"{what} has no memory of its own, want a plain torch.Tensor")
    return found


def without_gradient(what: str, value: Tensor) -> Tensor:
    """Detached. Who would lose a gradient by that is warned, once for each place of the call: not
    under no_grad or inference_mode, nor inside an autograd.Function, which sees to it itself.
    """
    if torch.is_grad_enabled():
        level, frame = 1, sys._getframe()
        while frame.f_back and str(frame.f_globals.get("__name__")).startswith("tokenyard."):
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"{what} requires grad, and this call passes no gradient on: take "
            f"tokenyard.nn.functional, or give {what}.detach()",
            stacklevel=level,
        )
    return value.detach()


def not_a_tensor(what: str, value: Any) -> ValueError:
    return ValueError(f"{what} is {kind(value)}, want a torch.Tensor")


def form(
    what: str,
    got: Sequence[int],
    dtype: torch.dtype,
    layout: torch.layout,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
) -> None:
    """What a tensor on any device must be, told by its attributes."""
    fits = len(got) == len(shape)
    for length, size in zip(shape, got):
        fits = fits and (length == size or isinstance(length, str))
    if not fits:
        want = "[" + ", ".join(map(str, shape)) + "]"
        raise ValueError(f"{what} has shape {list(got)}, want {want}")
    if dtype not in dtypes:
        raise ValueError(f"{what} has dtype {name(dtype)}, want {_names(dtypes)}")
    if layout is not torch.strided:
        raise ValueError(f"{what} has layout {layout}, want torch.strided")


def _contiguous(value: Tensor, after: EventHandle | None) -> Tensor:
    """Copied if need be, and then not before it is there to be read."""
    if value.is_contiguous():
        return value
    if after is not None:
        after.current_stream_wait()
    return value.contiguous()


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
    return _contiguous(value, after)


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
    return values, _contiguous(scales, after)


def topk_idx(value: Any, num_tokens: int | str, device: torch.device = CPU) -> Tensor:
    # A short way for what is plainly right: the checks below take as long as a small layout.
    if (
        type(value) is Tensor
        and value.dtype is topk_idx_t
        and value.dim() == 2
        and value.device == device
        and value.is_contiguous()
        and value.numel()
        and value.data_ptr()
        and not value.is_neg()
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
    """Experts as int32 or int64, on any device if none is said."""
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
    return _contiguous(value, after)


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
    """The layout that the user passed in parts, None if there is none."""
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
    """The layout against what is passed beside it."""
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


def same_counts(value: Layout, route: Route) -> None:
    told, counted = value.num_tokens_per_rank.tolist(), list(route.send_counts)
    if told != counted:
        raise ValueError(
            f"num_tokens_per_rank is {told}, want {counted}, the columns of is_token_in_rank "
            "added up"
        )


def bad_expert(
    topk_idx_TK: Tensor, place: int, num_experts: int, what: str = "topk_idx"
) -> ValueError:
    token, k = divmod(place, topk_idx_TK.shape[1])
    return ValueError(
        f"{what}[{token}, {k}] is {topk_idx_TK[token, k].item()}, want -1..{num_experts - 1} "
        f"(num_experts={num_experts})"
    )


def num_experts(value: Any, owned: int | None) -> int:
    """`owned` is the number of experts in placement=, if one was given."""
    integer("num_experts", value, at_least=1, at_most=MOST_EXPERTS)
    if owned is not None and value != owned:
        raise ValueError(f"num_experts is {value}, want {owned}, the length of placement=")
    return value


def ranks_per_node(value: Any, num_ranks: int) -> None:
    if not isinstance(value, (list, tuple)):
        integer("ranks_per_node", value, at_least=1)
        require(
            value <= num_ranks,
            f"ranks_per_node is {value}, want at most {num_ranks}, the ranks of the group",
        )
        return
    for node, size in enumerate(value):
        integer(f"ranks_per_node[{node}]", size, at_least=1)
    require(
        sum(value) == num_ranks,
        f"ranks_per_node is {list(value)}, {sum(value)} ranks in all, want {num_ranks}",
    )


def integer(what: str, value: Any, *, at_least: int, at_most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, want an integer")
    if value < at_least:
        raise ValueError(f"{what} is {value}, want at least {at_least}")
    if value > at_most:
        raise ValueError(f"{what} is {value}, want at most {at_most}")
    return value


def tag(value: Any) -> int:
    return integer("tag", value, at_least=-1)


def switch(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, want True or False")


def config(value: Any) -> Config:
    if not isinstance(value, Config):
        raise ValueError(f"config is {kind(value)}, want a tokenyard.Config")
    num_sms = integer("config.num_sms", value.num_sms, at_least=2, at_most=_MOST_SMS)
    if num_sms % 2:
        raise ValueError(f"config.num_sms is {num_sms}, want an even number")
    for which, send, recv in (
        ("nvl", value.num_max_nvl_chunked_send_tokens, value.num_max_nvl_chunked_recv_tokens),
        ("rdma", value.num_max_rdma_chunked_send_tokens, value.num_max_rdma_chunked_recv_tokens),
    ):
        integer(f"config.num_max_{which}_chunked_send_tokens", send, at_least=1)
        integer(f"config.num_max_{which}_chunked_recv_tokens", recv, at_least=1)
        if send >= recv:
            raise ValueError(
                f"config.num_max_{which}_chunked_send_tokens is {send}, want less than "
                f"num_max_{which}_chunked_recv_tokens ({recv})"
            )
    return value


def handle(value: Any, buffer_id: int) -> Handle:
    require(
        isinstance(value, Handle),
        f"handle is {kind(value)}, want the handle that dispatch returned",
    )
    require(
        value.buffer_id == buffer_id,
        f"handle is of dispatch call {value.call} on another Buffer or rank, want one that this "
        "Buffer's dispatch returned here",
    )
    return value


def no_routing(beside: Sequence[str]) -> None:
    """`beside` names what was given together with a handle."""
    if beside:
        raise ValueError(f"{', '.join(beside)} given with a handle, which has the routing already")


def same_tokens(x_TD: Tensor, num_tokens: int) -> None:
    if x_TD.shape[0] != num_tokens:
        raise ValueError(f"x has {x_TD.shape[0]} tokens, want {num_tokens}, those of the handle")


def biases(value: Any, like: Tensor, num_tokens: int, after: EventHandle | None) -> list[Tensor]:
    """None, a tensor, or a pair of them."""
    if value is None:
        return []
    named = {"bias": value}
    if isinstance(value, tuple):
        require(len(value) <= 2, f"bias is a tuple of {len(value)}, want at most 2 tensors")
        named = {f"bias[{i}]": one for i, one in enumerate(value)}
    shape, dtypes, device = (num_tokens, like.shape[1]), (like.dtype,), like.device
    return [
        _contiguous(
            tensor(what, one, shape=shape, dtypes=dtypes, device=device, after=after), after
        )
        for what, one in named.items()
        if one is not None
    ]


def placement(value: Any, num_ranks: int) -> Tensor:
    value = tensor("placement", value, shape=["experts"], dtypes=(torch.int32, torch.int64))
    require(value.shape[0] > 0, "placement is empty, want the rank of at least one expert")
    outside = ((value < 0) | (value >= num_ranks)).nonzero()
    if len(outside):
        expert = int(outside[0])
        raise ValueError(
            f"placement[{expert}] is {int(value[expert])}, want a rank, 0..{num_ranks - 1}"
        )
    return value.to(torch.int32).contiguous()


def previous_event(value: Any) -> EventHandle | None:
    """What must come first, if it is not over yet. Raises what it raised, if it failed."""
    if value is None:
        return None
    if not isinstance(value, EventOverlap):
        raise ValueError(f"previous_event is {kind(value)}, want an EventOverlap")
    if value.event is None or not value.event.is_over:
        return value.event
    value.event.current_stream_wait()
    return None
