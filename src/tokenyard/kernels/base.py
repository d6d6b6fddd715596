"""The kernels that every set has, and how a set is found.

A set is a module: "numba" for the CPU, "triton" for GPUs, "reference" for any device and for
reading. All sets have functions of these names and signatures, which agree with `spec` bit for bit.
Launchers allocate and choose the grid. They never validate: callers do, with `validate`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard.runtime import variables
from tokenyard.types import Aligned, DeviceCounts, Layout, Places, Route, UnpermuteGrads

_log = logging.getLogger("tokenyard")
SETS = ("numba", "reference", "triton")

Array = TypeVar("Array", Tensor, np.ndarray)
Tensors = Sequence[Tensor]
NodeOfRank = Sequence[int]
Step = Callable[[], int]  # of a compiled call: it returns a verdict


class RowSteps(NamedTuple):
    """The steps of a dispatch of few rows between nodes (`wire.nodes_table`)."""

    pack: Step  # write messages to other nodes, with parcels
    fill_own: Step  # leave this rank's rows for its own node in its staging
    relay: Step  # lay out what partners sent for the ranks of the node
    take: Step  # take this rank's rows


class SumSteps(NamedTuple):
    """The steps of a combine of few rows between nodes."""

    stage: Step  # leave the rows that other ranks of the node sum
    find: Step  # the rows of the neighbours; GENERAL if they staged other rows
    pack: Step  # write messages to other nodes, with room for sums
    sum_for: Sequence[Step]  # by column: sum for other nodes, into the messages
    relay: Step
    add_up: Sequence[Step]  # by column: the sums of this rank's tokens


class RowKernels(Protocol):
    """The kernels that every transport asks for, and what else a set can do."""

    # Whether ranks of one machine may share memory: the set has signals, rings and whole calls of
    # the low-latency mode, all of which order what one rank writes and another reads.
    shares_memory: bool
    # Whether the set puts rows into other ranks' symmetric memory, and raises flags there.
    puts_rows: bool
    # Whether the set has `count`.
    counts_on_device: bool

    def route(self, is_token_in_rank_TR: Tensor) -> Route:
        """List the rows by (rank, token), and each token's copies by rank."""

    def pack(self, x_TB: Tensor, index_N: Tensor | None, out_NB: Tensor) -> Tensor:
        """out[n] = x[index[n]], rows of bytes; without an index out[n] = x[n].

        Rows are contiguous; they may lie apart on both sides.
        """

    def reduce(
        self,
        rows_ND: Tensor,
        route: Route,
        node_of_rank: NodeOfRank,
        biases_TD: Tensors,
        out_TD: Tensor,
    ) -> Tensor:
        """Sum each token's rows as `spec.combine` does, into `out`, which has the rows' dtype.

        The rows that came back lie by rank, in the order in which they were sent there.
        """


class SharingKernels(RowKernels, Protocol):
    """Rows in memory that ranks share."""

    def scatter(
        self,
        columns: Sequence[Tensor],
        route: Route,
        blocks_R: np.ndarray,
        starts_R: np.ndarray,
        rows_R: np.ndarray,
    ) -> None:
        """Each token's row into its slot in each of its ranks' memory.

        A rank's block has `rows` rows of each column, one column after the other, each from a new
        cache line. This rank's rows begin with number `starts` there. Where a block is 0, rows for
        that rank are left out. Rows of a column may lie apart, as they do in records.
        """

    def reduce_at(
        self,
        addresses_R: np.ndarray,
        route: Route,
        node_of_rank: NodeOfRank,
        biases_TD: Tensors,
        out_TD: Tensor,
    ) -> None:
        """Sum as `reduce` does, given the address of each rank's first row."""

    def list_by_lane(self, route: Route, topk_idx_TK: Tensor, rank_of_expert_E: Tensor) -> None:
        """Reorder each token's copies by the last lane of their ranks."""


class Kernels(RowKernels, Protocol):
    def logfmt(self, y_ND: Tensor, out_ND: Tensor) -> None:
        """What a receiver of bfloat16 rows has after LogFMT, in float32 (`spec.logfmt`). The set
        "triton" has none: the low-latency mode is for CPU tensors.
        """

    def layout(
        self,
        topk_idx_TK: Tensor,
        rank_of_expert_E: Tensor,
        num_ranks: int,
        node_of_rank: NodeOfRank | None,
    ) -> tuple[Layout, int]:
        """Count and mark who gets each token. `node_of_rank` is None on one node.

        The number beside the layout is the flat place of the first index outside -1..E-1, or -1.
        Such an index never reaches an address; the layout is then not to be used.
        """

    def count(
        self,
        topk_idx_TK: Tensor,
        rank_of_expert_E: Tensor,
        num_ranks: int,
        node_of_rank: NodeOfRank | None,
    ) -> DeviceCounts:
        """`layout` and `route` without a number that the host must read first.

        Only sets for devices, for which the host would have to wait, have it.
        """

    def localise(
        self, topk_idx_NK: Tensor, topk_weights_NK: Tensor | None, local_of_expert_E: Tensor
    ) -> None:
        """In place: global expert ids to local ones; -1 and 0.0 for those not in the table."""

    def align(
        self, topk_ids_TK: Tensor, block_size: int, num_experts: int, capacity: int
    ) -> tuple[Aligned, int]:
        """Group the (token, k) pairs by expert as `spec.moe_align_block_size` does.

        The ids are int32 or int64, the capacity is enough for any routing. The number beside the
        result is the flat place of the first id outside -1..E-1, or -1, as in `layout`.
        """

    def place(
        self, topk_idx_NK: Tensor, num_experts: int, expert_alignment: int
    ) -> tuple[Places, int]:
        """Where `spec.permute` puts each row's copies; the number beside it is as in `align`."""

    def spread(self, x_NB: Tensor, row_of_NK: Tensor, out_MB: Tensor) -> Tensor:
        """out[row_of[n, k]] = x[n], rows of bytes; zeros where nothing goes.

        Rows are contiguous; they may lie apart on both sides.
        """

    def unpermute(
        self, y_MD: Tensor, row_of_NK: Tensor, weights_NK: Tensor | None, out_ND: Tensor
    ) -> int:
        """Sum each row's results as `spec.unpermute` does, into `out`, which has y's dtype.

        Weights have the dtype of the sums. Rows are as in `spread`. Returns the flat place of the
        first index outside -1..M-1, or -1; if there is one, nothing is written.
        """

    def unpermute_backward(
        self,
        grad_ND: Tensor,
        y_MD: Tensor,
        row_of_NK: Tensor,
        weights_NK: Tensor,
        out: UnpermuteGrads,
    ) -> int:
        """Both gradients as `spec.unpermute_backward` makes them, into `out`.

        grad, y and its gradient have one dtype, both weights that of the sums. Rows, and what is
        returned, are as in `unpermute`.
        """

    def rearrange(self, dst: Array, src: Array) -> None:
        """dst[i, j, ...] = src[i, j, ...] at every index, bytes whatever they mean.

        Of the same kind, shape and dtype; strides of any sign and size, but the memory of src is
        not that of dst. If elements of dst share memory, the last one in the order of indices wins.
        """

    def plan_to_fp8(
        self, num_rows: int, hidden: int, dtype: torch.dtype, round_scale: bool, use_ue8m0: bool
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """A function that does what `spec.cast_to_fp8` does to contiguous rows of this shape.

        A cast of one token is over sooner than Python has settled what follows from its shape, so
        that is done here, for all casts of that shape.
        """

    def plan_from_fp8(
        self, num_rows: int, hidden: int, use_ue8m0: bool
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """A function that does what `spec.cast_back` does to contiguous values and scales."""


@cache
def available() -> tuple[str, ...]:
    """The sets that can be used on CPU tensors here. "triton" can, where it is interpreted."""
    return tuple(name for name in SETS if name != "triton" or interprets_triton())


def interprets_triton() -> bool:
    """Whether Triton runs kernels in Python, on CPU tensors. It decides when they are defined."""
    return variables.read("TRITON_INTERPRET") == "1" and has_triton()


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def load(name: str) -> Kernels:
    if name not in SETS:
        raise ValueError(f"unknown kernel set {name!r}; available: auto, {', '.join(available())}")
    if name == "triton" and not has_triton():
        raise ValueError("kernels is 'triton', which is not installed: pip install triton")
    return cast(Kernels, importlib.import_module(f"tokenyard.kernels.{name}"))


@cache
def choose(device_type: str) -> str:
    """The fastest set for a device. Cached so that the choice is logged once."""
    name, why = choice(device_type)
    _log.info("kernels: %s, %s", name, why)
    return name


def choice(device_type: str) -> tuple[str, str]:
    """The fastest set for a device, and why it is that. Torch says cuda of AMD's devices too."""
    if device_type == "cpu":
        return "numba", "the fastest for tensors on cpu"
    if device_type != "cuda":
        return "reference", f"no other knows tensors on {device_type}"
    if has_triton():
        return "triton", "the fastest for tensors on cuda"
    return "reference", "triton is not installed"


def why_not(name: str, device_type: str) -> str:
    """Why this set is not the one that is chosen for a device."""
    if name == "reference":
        return "slower"
    if name == "triton" and not has_triton():
        return "not installed"
    if name == "triton" and device_type == "cpu":
        return "interpreted, and slower" if interprets_triton() else "for GPUs"
    is_for_it = device_type == ("cpu" if name == "numba" else "cuda")
    return "not asked for" if is_for_it else f"not for tensors on {device_type}"


@cache
def pick(name: str, device_type: str) -> Kernels:
    """The set of this name; "auto" is the fastest for the device. Cached, since calls are short."""
    if name == "auto":
        return load(choose(device_type))
    found = load(name)
    if name == "numba" and device_type != "cpu":
        raise ValueError(f"kernels is 'numba' for tensors on {device_type}, want auto or reference")
    if (
        name == "triton"
        and device_type != "cuda"
        and (device_type != "cpu" or not interprets_triton())
    ):
        raise ValueError(
            f"kernels is 'triton' for tensors on {device_type}, want auto or reference "
            "(or TRITON_INTERPRET=1 for tensors on cpu)"
        )
    return found


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of rows of this dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
