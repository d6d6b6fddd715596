"""The first step of a call: check what this rank was given, count it, and list its rows.

All of it is local. So whatever is wrong with one rank's input is found here, before this rank has
sent anything to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard import validate
from tokenyard.engine.balanced import Balance
from tokenyard.engine.choice import Choice
from tokenyard.kernels import Kernels
from tokenyard.replicas import Replicas, as_replicas, num_logical, replicas_of
from tokenyard.results import Handle
from tokenyard.runtime import memory
from tokenyard.runtime.events import EventHandle
from tokenyard.topology import Placement, even_placement
from tokenyard.transports import Sum
from tokenyard.types import Config, DeviceCounts, Layout, Route
from tokenyard.wire.message import PAYLOAD_WORDS

_COUNTED_TOGETHER = "for which ranks count together: want dispatch with num_experts, and no layout"
SMALL = 1 << 16  # bytes of a sum that are not worth a segment of shared memory


class DispatchRequest(NamedTuple):
    """What a user asked dispatch for, unchecked."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    num_tokens_per_rank: Any
    is_token_in_rank: Any
    num_tokens_per_expert: Any
    num_experts: Any
    expert_alignment: Any
    num_worst_tokens: Any
    config: Any
    previous_event: Any
    tag: Any
    balanced: Any = True  # where the Buffer has a balance
    # What else ranks must agree on, by field of `Call`.
    also: Mapping[str, int] = MappingProxyType({})

    @staticmethod
    def plain(
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        num_experts: Any,
        expert_alignment: Any,
        config: Any,
        tag: Any,
        balanced: Any = True,
    ) -> DispatchRequest:
        """A dispatch that counts by itself, waits for no event, and gives the rows that arrive."""
        routing = topk_idx, topk_weights, None, None, None, num_experts, expert_alignment
        return DispatchRequest(x, *routing, 0, config, None, tag, balanced)

    @staticmethod
    def by_layout(
        x: Any,
        is_token_in_rank_TR: Tensor,
        num_tokens_per_rank: Tensor,
        num_experts: int,
        config: Any,
        tag: Any,
    ) -> DispatchRequest:
        """A request without experts: the layout alone says where tokens go."""
        idle = num_tokens_per_rank.new_zeros(num_experts)
        layout = num_tokens_per_rank, is_token_in_rank_TR, idle
        return DispatchRequest(x, None, None, *layout, None, 1, 0, config, None, tag)


class AgainRequest(NamedTuple):
    """What a user asked of a dispatch along a handle, unchecked."""

    x: Any
    handle: Any
    config: Any
    beside: Sequence[str] = ()  # the names of what else was given, which a handle says already
    previous_event: Any = None


class CombineRequest(NamedTuple):
    """What a user asked combine for, unchecked."""

    x: Any
    handle: Any
    topk_weights: Any
    bias: Any
    out: Any
    config: Any
    previous_event: Any
    tag: Any

    @staticmethod
    def plain(x: Any, handle: Any, out: Any, config: Any, tag: Any) -> CombineRequest:
        """A combine of rows alone, which waits for no event."""
        return CombineRequest(x, handle, None, None, out, config, None, tag)


class Checked(NamedTuple):
    """What a dispatch was given, checked."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    given: Layout | None  # by the user
    placement: Placement
    expert_alignment: int
    num_worst_tokens: int
    config: Config
    tag: int
    asked: Tensor | None = None  # topk_idx before a balance, where there is one


class Counted(NamedTuple):
    """The rows of a dispatch, listed and counted."""

    layout: Layout
    route: Route
    on_device: DeviceCounts | None = None  # where the host has not read the counts


class Preparation:
    def __init__(
        self,
        kernels: Kernels,
        rank: int,
        num_ranks: int,
        node_of_rank: Sequence[int] | None,
        placement: Placement | None,
        device: torch.device,
        empty: Callable[[int, int, torch.dtype], Tensor],
        on_device: bool,
        balance: Balance | None,
    ) -> None:
        """`node_of_rank` is None on one node, `placement` where experts are spread evenly. `empty`
        gives the transport's memory for a result. `on_device` says that a dispatch may tell counts
        that the host has not read.
        """
        self.balance = balance
        self._on_device = on_device
        self._device, self._empty = device, empty
        self._kernels = kernels
        self._num_ranks = num_ranks
        self._node_of_rank = node_of_rank
        self._rank = rank
        self.place(placement)
        self._even_placements: dict[int, Placement] = {}
        self._numbers = torch.empty(0, 1, dtype=torch.int32, device=device)
        self._checked_config: Config | None = None

    def place(self, placement: Placement | None) -> None:
        """From now on experts live there; None where they are spread evenly."""
        self.given_placement = placement
        self._replicas: dict[int, Replicas] = {}  # by the number of experts
        # Which copies tokens go to, where experts have copies.
        self.choice: Choice | None = None
        replicas = replicas_of(placement)
        if replicas is not None:
            nodes = self._node_of_rank or [0] * self._num_ranks
            self.choice = Choice(replicas, self._rank, nodes, self._device)

    def layout(self, topk_idx: Any, num_experts: Any) -> Layout:
        validate.require(self.balance is None, f"the Buffer has a balance, {_COUNTED_TOGETHER}")
        topk_idx = validate.topk_idx(topk_idx, "tokens", self._device)
        placement = self.placement(num_experts)
        if self.choice is not None:
            topk_idx = self.choice(topk_idx)
        return self.count_ids(topk_idx, placement)

    def count_ids(self, topk_idx: Tensor, placement: Placement) -> Layout:
        layout, first_bad = self._kernels.layout(
            topk_idx, placement.rank_of_expert, self._num_ranks, self._node_of_rank
        )
        if first_bad >= 0:
            raise validate.bad_expert(topk_idx, first_bad, placement.num_experts)
        return layout

    def placement(self, num_experts: Any) -> Placement:
        given = self.given_placement
        validate.num_experts(num_experts, None if given is None else num_logical(given))
        if given is not None:
            return given
        if num_experts not in self._even_placements:
            made = even_placement(num_experts, self._num_ranks, self._device)
            self._even_placements[num_experts] = made
        return self._even_placements[num_experts]

    def slots(self, num_experts: Any) -> Placement:
        """Where rows go: the placement, or with a balance that of the slots."""
        placement = self.placement(num_experts)
        return placement if self.balance is None else self.balance.placement(placement)

    def replicas(self, num_experts: Any) -> Replicas:
        """The placement, also one without copies: which experts lie in each rank's slots."""
        placement = self.placement(num_experts)
        if num_experts not in self._replicas:
            self._replicas[num_experts] = as_replicas(placement)
        return self._replicas[num_experts]

    def num_logical(self, num_slots: int) -> int:
        """How many logical experts there are, where counts were given for each of their copies."""
        given = self.given_placement
        return num_slots if given is None else num_logical(given)

    def owners(self, num_experts: int) -> list[int]:
        """The rank of each logical expert; of its first copy, where it has several."""
        replicas = self.replicas(num_experts)
        return [replicas.rank_of_slot[copies[0]] for copies in replicas.copies]

    @property
    def any_placement(self) -> Placement:
        """The placement for a call whose rows go to no expert."""
        given = self.given_placement
        return self.placement(self._num_ranks) if given is None else given

    @property
    def any_num_experts(self) -> int:
        """A number of experts that a call may name: for one whose rows go to no expert."""
        given = self.given_placement
        return self._num_ranks if given is None else given.num_experts

    def config(self, config: Any) -> Config:
        if config is not self._checked_config:
            self._checked_config = validate.config(config)
        return config

    def check(self, request: DispatchRequest) -> Checked:
        wait(request.previous_event)  # counting reads what it made
        device = self._device
        x, scales = validate.dispatched(request.x, device=device)
        topk_idx, topk_weights = validate.topk(
            request.topk_idx, request.topk_weights, x.shape[0], device
        )
        if self.choice is not None and topk_idx is not None:
            topk_idx = self.choice(topk_idx)
        alignment = validate.integer("expert_alignment", request.expert_alignment, at_least=1)
        num_worst = validate.integer("num_worst_tokens", request.num_worst_tokens, at_least=0)
        config = self.config(request.config)
        given = validate.layout(
            request.num_tokens_per_rank,
            request.is_token_in_rank,
            request.num_tokens_per_expert,
            num_tokens=x.shape[0],
            num_ranks=self._num_ranks,
            device=device,
        )
        if given is None:
            validate.require(
                topk_idx is not None and request.num_experts is not None,
                "no layout is given, want num_tokens_per_rank, is_token_in_rank and "
                "num_tokens_per_expert, or topk_idx and num_experts",
            )
            placement = self.placement(request.num_experts)
        else:
            placement = self._placement_of(given, request.num_experts)
            named = request.num_experts if self.choice is None else None
            validate.layout_fits(given, topk_idx, named)
        tag = validate.tag(request.tag)
        validate.switch("balanced", request.balanced)
        asked = topk_idx
        if self.balance is not None and topk_idx is not None and request.balanced:
            # Last, since other ranks take part in it.
            validate.require(given is None, f"a layout is given, {_COUNTED_TOGETHER}")
            topk_idx = self.balance.choose(topk_idx, placement, tag)
            placement = self.balance.placement(placement)
        beside = given, placement, alignment, num_worst, config, tag, asked
        return Checked(x, scales, topk_idx, topk_weights, *beside)

    def count(self, checked: Checked) -> Counted:
        """Who gets which rows."""
        placement, topk_idx = checked.placement, checked.topk_idx
        if checked.given is not None:
            validate.same_counts(checked.given)
            return Counted(checked.given, self._kernels.route(checked.given.is_token_in_rank))
        assert topk_idx is not None, "it was required"
        # What is told for each expert and each rank must fit a message.
        fits = 1 + placement.most_experts + self._num_ranks <= PAYLOAD_WORDS
        if self._on_device and fits:
            counts = self._kernels.count(
                topk_idx, placement.rank_of_expert, self._num_ranks, self._node_of_rank
            )
            return Counted(counts.layout, counts.route, counts)
        layout = self.count_ids(topk_idx, placement)
        return Counted(layout, self._kernels.route(layout.is_token_in_rank))

    def _placement_of(self, layout: Layout, num_experts: Any) -> Placement:
        """The placement of a user's layout, which counts by copy where experts have copies."""
        counted = layout.num_tokens_per_expert.shape[0]
        if self.choice is None:
            return self.placement(counted)
        given = self.placement(self.choice.num_experts if num_experts is None else num_experts)
        validate.require(
            counted == given.num_experts,
            f"num_tokens_per_expert has {counted} entries, want {given.num_experts}, one a copy, "
            "as get_dispatch_layout counts",
        )
        return given

    def combine(
        self, request: CombineRequest, known: Handle, pending: EventHandle | None
    ) -> list[Sum]:
        """The columns of a combine: x, and the weights if they are given. The sums of x go to `out`
        unless it is None. What must be copied is copied after the pending event.
        """
        num_rows, num_tokens = known.ledger.num_rows, known.num_tokens
        rows = validate.rows(
            "x",
            request.x,
            num_rows=num_rows,
            dtypes=validate.SUMMABLE,
            after=pending,
            device=self._device,
        )
        biases = validate.biases(request.bias, rows, num_tokens, pending)
        weights, out = None, request.out
        if request.topk_weights is not None:
            shape = (num_rows, "topk")
            weights = validate.topk_weights(request.topk_weights, shape, pending, self._device)
        if out is None:
            out = self.empty_sum(rows, num_tokens)
        else:
            read = [rows, *biases] if weights is None else [rows, *biases, weights]
            out = validate.out(out, num_tokens, rows, read)
        sums = [Sum(rows, biases, out)]
        if weights is not None:
            sums.append(Sum(weights, (), self.empty_sum(weights, num_tokens)))
        return sums

    def empty_sum(self, rows_ND: Tensor, num_tokens: int) -> Tensor:
        """Memory for the sums of these rows."""
        width, dtype = rows_ND.shape[1], rows_ND.dtype
        if num_tokens * width * rows_ND.element_size() < SMALL:
            return memory.empty(num_tokens, width, dtype=dtype, device=self._device)
        return self._empty(num_tokens, width, dtype)

    def token_numbers(self, num_tokens: int) -> Tensor:
        """[T, 1] int32: 0, 1, 2, ..., made anew only if there were not as many."""
        if num_tokens > self._numbers.shape[0]:
            with torch.inference_mode(False):
                numbers = torch.arange(num_tokens, dtype=torch.int32, device=self._device)
            self._numbers = numbers[:, None]
        return self._numbers[:num_tokens]

    def numbers_at(self, num_tokens: int) -> int:
        """The address of what `token_numbers` returns."""
        numbers = self._numbers
        if num_tokens > numbers.shape[0]:
            numbers = self.token_numbers(num_tokens)
        return numbers.data_ptr()


def fits(out: Any, rows: Tensor, num_tokens: int) -> bool:
    """Whether sums of these rows can be written there as they are."""
    return (
        validate.lies_at(out, 2, rows.dtype) != validate.NOT_PLAIN
        and out.shape == (num_tokens, rows.shape[1])
        and not out.requires_grad
        and not validate.overlap(out, rows)
    )


def wait(previous_event: Any) -> None:
    pending = validate.previous_event(previous_event)
    if pending is not None:
        pending.current_stream_wait()
