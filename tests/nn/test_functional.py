"""What nn.functional does besides gradients: tickets, checkpoints, compilers, ranks that differ."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.cases.clock import scaled
from tests.cases.nn import exchange as jobs
from tokenyard.nn import functional as tf
from tokenyard.nn import operators, tickets
from tokenyard.testing import Processes, assert_same, run_virtual

NUM_EXPERTS = jobs.NUM_EXPERTS


def leaves(rank: int, num_tokens: int = 5, hidden: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    topk_idx, weights = jobs.routed(rank, num_tokens)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, hidden, generator=generator)
    return x.requires_grad_(), topk_idx, weights.requires_grad_()


def test_values_are_those_of_the_buffer() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            with torch.no_grad():
                want = buffer.dispatch(
                    x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS
                )
            assert_same(rows.x.detach(), want.recv_x)
            assert_same(rows.topk_idx, want.recv_topk_idx)
            assert_same(rows.topk_weights.detach(), want.recv_topk_weights)
            got = tf.combine(buffer, rows.x, rows)
            assert_same(got.detach(), buffer.combine(rows.x.detach(), want.handle).x)

    run_virtual(job, 3)


@pytest.mark.parametrize("num_rows", [None, 9], ids=["as-many", "static"])
def test_permute_is_that_of_ops(num_rows: int | None) -> None:
    x, topk_idx = torch.randn(3, 4), torch.tensor([[1, -1], [0, 1], [-1, -1]])
    got = tf.permute(x, topk_idx, 2, expert_alignment=2, num_rows=num_rows)
    want = tokenyard.permute(x, topk_idx, 2, expert_alignment=2)
    assert_same(got.x[:4], want.x)
    assert_same(got.x[4:], torch.zeros(0 if num_rows is None else 5, 4))
    assert_same([got.row_of, got.offsets], [want.row_of, want.offsets])


@pytest.mark.parametrize("width", [3, 8], ids=["loop", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_grouped_mm(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(7, width).to(dtype)
    matrices = torch.randn(4, 5, width).to(dtype).transpose(1, 2).requires_grad_()
    offsets = torch.tensor([2, 2, 6, 6], dtype=torch.int32)
    out = tf.grouped_mm(x, matrices, offsets)
    want = torch.cat([x[:2] @ matrices[0], x[2:6] @ matrices[2], torch.zeros(1, 5).to(dtype)])
    torch.testing.assert_close(out, want)
    (grad,) = torch.autograd.grad(out.sum(), matrices)  # expanded: stride 0
    (want_grad,) = torch.autograd.grad(want.sum(), matrices)
    torch.testing.assert_close(grad, want_grad)


def test_grouped_mm_of_a_rank_without_experts() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    out = tf.grouped_mm(x, torch.randn(0, 4, 8), torch.zeros(0, dtype=torch.int32))
    assert_same(out.detach(), torch.zeros(3, 8))
    out.sum().backward()
    assert_same(x.grad, torch.zeros(3, 4))


def test_a_fixed_number_of_rows_changes_no_bit() -> None:
    def job(group: Any) -> None:
        with jobs.open_buffer(group) as buffer:
            outs = []
            for worst in (0, 20):
                x = leaves(group.rank())[0]
                jobs.layer(buffer, x, num_worst_tokens=worst).square().sum().backward()
                outs.append([jobs.layer(buffer, x, num_worst_tokens=worst).detach(), x.grad])
            assert_same(outs[1], outs[0])

    run_virtual(job, 3)


def test_two_uses_of_one_dispatch() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            one = tf.combine(buffer, rows.x * 2, rows)
            other = tf.combine(buffer, rows.x * 3, rows)
            grad_of_sum = torch.autograd.grad((one + other).sum(), x, retain_graph=True)[0]
            grad_of_five = torch.autograd.grad(tf.combine(buffer, rows.x * 5, rows).sum(), x)[0]
            assert_same(grad_of_sum, grad_of_five)

    run_virtual(job, 2)


def test_gradients_that_nobody_gave_are_zeros() -> None:
    """One rank uses the rows, another the weights, a third both: all make the same calls."""

    def job(group: Any) -> tuple[Tensor, Tensor]:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            uses = [rows.x.sum(), rows.topk_weights.sum(), rows.x.sum() + rows.topk_weights.sum()]
            uses[group.rank()].backward()
            return x.grad, weights.grad

    results = run_virtual(job, 3).results
    owner = torch.tensor([0, 0, 1, 1, 2, 2, -1])  # the last is for -1
    for rank, (grad_x, grad_weights) in enumerate(results):
        owners = owner[leaves(rank)[1]]
        copies = (owners == 0).any(1).float() + (owners == 2).any(1).float()
        assert_same(grad_x, copies[:, None].expand(-1, 8).contiguous())
        assert_same(grad_weights, (owners > 0).float())


@pytest.mark.parametrize("needs", ["x", "weights"])
def test_only_what_needs_a_gradient_goes_back(needs: str) -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(group.rank())
        x.requires_grad_(needs == "x"), weights.requires_grad_(needs == "weights")
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            (rows.x.sum() + rows.topk_weights.sum()).backward()
            assert_same(weights.grad, (topk_idx >= 0).float() if needs == "weights" else None)
            assert (x.grad is not None) == (needs == "x")

    sent = run_virtual(job, 2).bytes_sent["combine"]
    rows = run_virtual(rows_between, 2).results
    width = 8 if needs == "x" else jobs.NUM_TOPK
    assert sent[0, 1] == 4 * width * rows[0][1]
    assert sent[1, 0] == 4 * width * rows[1][0]


NEEDS = {
    "x-on-one": [(1, 1), (0, 1)],
    "all-three": [(1, 0), (0, 1), (1, 1)],
    "apart": [(1, 0), (0, 1)],
}


@pytest.mark.parametrize("hidden", [8, jobs.NUM_TOPK], ids=["wide", "as-wide-as-top-k"])
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS)
def test_ranks_may_differ_in_what_needs_a_gradient(
    needs: list[tuple[int, int]], hidden: int
) -> None:
    def job(group: Any, given: list[tuple[int, int]]) -> list[Tensor | None]:
        x, topk_idx, weights = leaves(group.rank(), hidden=hidden)
        x.requires_grad_(bool(given[group.rank()][0]))
        weights.requires_grad_(bool(given[group.rank()][1]))
        with tokenyard.Buffer(group) as buffer:
            for _ in range(2):
                rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
                ((1 + rows.x.sum(1)) * (2 + rows.topk_weights.sum(1))).sum().backward()
        return [x.grad, weights.grad]

    got = run_virtual(job, len(needs), needs).results
    want = run_virtual(job, len(needs), [(1, 1)] * len(needs)).results
    for rank, need in enumerate(needs):
        for mine, whole, needed in zip(got[rank], want[rank], need):
            assert_same(mine, whole if needed else None)


def said(step: Callable[[], Any]) -> str:
    try:  # no pytest.raises, which would keep the handle until the next collection
        step()
    except tokenyard.CallMismatch as error:
        return str(error)
    return "nothing"


def test_ranks_of_which_one_needs_gradients_are_told_at_once() -> None:
    """Else the backward pass of one waits for the others, until its time is up."""

    def job(group: Any) -> list[str]:
        x, topk_idx, weights = leaves(group.rank())
        x, weights = x.detach(), weights.detach()
        alone = x.clone().requires_grad_(group.rank() == 0)
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            dispatch = partial(tf.dispatch, buffer, topk_idx=topk_idx, topk_weights=weights)
            told = [said(lambda: dispatch(x=alone, num_experts=NUM_EXPERTS))]
            rows = dispatch(x=x, num_experts=NUM_EXPERTS)  # the Buffer still works
            y = rows.x.requires_grad_(group.rank() == 0)
            told.append(said(lambda: tf.combine(buffer, y, rows)))
            with torch.no_grad():
                dispatch(x=alone, num_experts=NUM_EXPERTS)
            return told

    first, second = run_virtual(job, 2).results
    for what, here, there in zip(("x or topk_weights of dispatch", "y of combine"), first, second):
        assert here.startswith(f"{what} requires grad on this rank and not on another")
        assert there.startswith(f"{what} requires grad on another rank and not on this one")


def test_a_rank_that_makes_no_backward_pass_is_told_of() -> None:
    def job(group: Any) -> str:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group, timeout=scaled(60)) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            again = partial(tf.dispatch, buffer, x, topk_idx, weights, NUM_EXPERTS)
            return said(rows.x.sum().backward if group.rank() == 0 else again)

    assert run_virtual(job, 2).results == [
        "combine: ranks differ in what they call: combine on rank 0, dispatch on rank 1; this is "
        "the gradient of nn.functional.dispatch, whose outputs the losses of all ranks must use, "
        "or of none",
        "dispatch: ranks differ in what they call: dispatch on rank 1, combine on rank 0",
    ]


def rows_between(group: Any) -> list[int]:
    """How many rows come from each rank."""
    x, topk_idx, weights = leaves(group.rank())
    with tokenyard.Buffer(group) as buffer, torch.no_grad():
        got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=NUM_EXPERTS)
        return list(got.handle.flow.recv_counts)


def test_without_gradients_nothing_is_kept() -> None:
    def job(group: Any) -> None:
        with jobs.open_buffer(group) as buffer, torch.no_grad():
            out = jobs.layer(buffer, leaves(group.rank())[0])
            assert not out.requires_grad

    before = tickets.num_issued()
    run_virtual(job, 2)
    assert tickets.num_issued() == before


def test_a_handle_lives_as_long_as_its_ticket() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(0)
        before = tickets.num_issued()
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            out = tf.combine(buffer, rows.x, rows._replace(ticket=rows.ticket.view(1, 1)))
            ticket = rows.ticket[:]
            del rows
            assert tickets.num_issued() == before + 1
            del ticket
            assert tickets.num_issued() == before + 1  # the tape needs it
            out.sum().backward()
            del out
            assert tickets.num_issued() == before

    run_virtual(job, 1)


def test_a_ticket_keeps_its_buffer() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(0)
        buffer = tokenyard.Buffer(group)
        rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
        alive = weakref.ref(buffer)
        del buffer
        gc.collect()
        rows.x.sum().backward()
        assert x.grad is not None
        del rows
        gc.collect()
        assert alive() is None

    run_virtual(job, 1)


def test_a_ticket_of_nobody_raises_on_all_ranks() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            ticket = rows.ticket.clone() if group.rank() else torch.tensor([-5])
            with pytest.raises(ValueError, match="handle is None, want the handle that dispatch"):
                tf.combine(buffer, rows.x, rows._replace(ticket=ticket))
            tf.combine(buffer, rows.x, rows)  # and the Buffer goes on working

    run_virtual(job, 2)


def test_the_number_of_tokens_is_checked() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(group.rank())
        with tokenyard.Buffer(group) as buffer:
            rows = tf.dispatch(buffer, x, topk_idx, weights, NUM_EXPERTS)
            with pytest.raises(ValueError, match="num_tokens is 6, want 5, those of dispatch's x"):
                tf.combine(buffer, rows.x, rows._replace(num_tokens=6))

    run_virtual(job, 2)


@pytest.mark.parametrize("early_stop", [False, True])
def test_activation_checkpointing(early_stop: bool) -> None:
    def job(group: Any) -> None:
        with jobs.open_buffer(group) as buffer:
            grads = []
            for again in (False, True):
                x = leaves(group.rank())[0]
                out = x
                for _ in range(2):
                    if again:
                        layer = checkpoint(
                            jobs.layer, buffer, out, use_reentrant=False, early_stop=early_stop
                        )
                    else:
                        layer = jobs.layer(buffer, out)
                    out = out + layer
                out.square().sum().backward()
                grads.append(x.grad)
            assert_same(grads[1], grads[0])

    run_virtual(job, 2)


def test_opcheck_of_the_exchange() -> None:
    def job(group: Any) -> None:
        x, topk_idx, weights = leaves(0)
        with tokenyard.Buffer(group) as buffer:
            number = tickets.number_of(buffer)
            for worst in (0, 9):
                rows = tf.dispatch(
                    buffer, x, topk_idx, weights, NUM_EXPERTS, num_worst_tokens=worst
                )
                args = (x, topk_idx, weights, number, NUM_EXPERTS, worst, None, True, False)
                # test_aot_dispatch wants equal outputs, and every dispatch has its own ticket.
                torch.library.opcheck(
                    operators.dispatch.operator,
                    args,
                    test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
                )
                y = rows.x.detach().requires_grad_()
                w = rows.topk_weights.detach().requires_grad_()
                ticket, num_rows = rows.ticket, len(rows.x)
                torch.library.opcheck(operators.combine.operator, (y, ticket, number, len(x), True))
                torch.library.opcheck(
                    operators.combine_both.operator, (y, w, ticket, number, len(x), True, True)
                )
                torch.library.opcheck(
                    operators.dispatch_again.operator, (x, ticket, number, num_rows)
                )

    run_virtual(job, 1)


def test_permute_is_one_function_with_gradients() -> None:
    x, topk_idx = torch.ones(3, 4, requires_grad=True), torch.tensor([[1, -1], [0, 1], [-1, -1]])
    assert tokenyard.permute is tf.permute
    assert tokenyard.unpermute is tf.unpermute
    rows = tokenyard.permute(x, topk_idx, 2)
    (grad,) = torch.autograd.grad(tokenyard.unpermute(rows.x, rows.row_of).sum(), x)
    assert grad[:, 0].tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=r"permute with scales, out or kernels has no gradients"):
        tokenyard.permute(x, topk_idx, 2, kernels="reference")
    with pytest.raises(ValueError, match=r"unpermute with out or kernels has no gradients"):
        tokenyard.unpermute(x, rows.row_of, out=torch.empty(3, 4))
    with torch.no_grad():
        tokenyard.permute(x, topk_idx, 2, kernels="reference")


def test_opcheck_of_what_is_local() -> None:
    topk_idx = torch.tensor([[1, -1], [0, 1], [-1, -1]])
    x = torch.randn(3, 4, requires_grad=True)
    weights = torch.rand(3, 2, requires_grad=True)
    got = tf.permute(x, topk_idx, 2)
    y = torch.randn(len(got.x), 4, requires_grad=True)
    for num_rows in (-1, 10):
        torch.library.opcheck(operators.permute.operator, (x, topk_idx, 2, 1, num_rows))
    torch.library.opcheck(operators.spread.operator, (x, got.row_of, 5))
    torch.library.opcheck(operators.unpermute.operator, (y, got.row_of, None))
    torch.library.opcheck(operators.unpermute.operator, (y, got.row_of, weights))
    torch.library.opcheck(operators.unpermute_backward.operator, (x, y, got.row_of, weights))
    matrices = torch.randn(2, 4, 8, requires_grad=True)
    torch.library.opcheck(operators.grouped_mm.operator, (y, matrices, got.offsets))
    torch.library.opcheck(operators.grouped_outer.operator, (y, y, got.offsets))


@pytest.mark.processes
@pytest.mark.parametrize("worst", [0, 24], ids=["as-many", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(two_processes: Processes, dtype: torch.dtype, worst: int) -> None:
    two_processes.run(jobs.compiled, "aot_eager", worst, dtype)


@pytest.mark.slow
@pytest.mark.processes
def test_compile_with_inductor(two_processes: Processes) -> None:
    two_processes.run(jobs.compiled, "inductor", 24, torch.float32)
