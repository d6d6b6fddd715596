"""Layers that take a prepared exchange by themselves, for few tokens: nobody notices."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard
from tests.cases.nn.few import ordinary, through_experts, watched
from tests.cases.nn.moe import HIDDEN, NUM_EXPERTS, make_model
from tokenyard.errors import BufferClosed
from tokenyard.nn import rebalance as rebalance_module
from tokenyard.testing import assert_same, poisoned, run_virtual

STEPS = 6


def inputs(turn: int, rank: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)


def routed(turn: int, rank: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(turn + 7 * rank)
    chosen = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2)
    x = inputs(turn, rank, num_tokens)
    return x, chosen.indices, chosen.values, NUM_EXPERTS


def open_buffer(group: Any) -> tokenyard.Buffer:
    return tokenyard.Buffer(group, transport="direct")


def any_number(group: Any, inference: bool, dtype: torch.dtype) -> None:
    """Ranks differ in their numbers of tokens, of which some are too many."""
    rank = group.rank()
    without = torch.inference_mode if inference else torch.no_grad
    with open_buffer(group) as buffer, without():
        model = make_model(buffer, dtype=None).to(dtype).eval()
        numbers = [(3, 1, 0), (0, 0, 0), (128, 1, 129), (0, 300, 2), (1, 1, 1), (64, 128, 9)]
        for turn, of_rank in enumerate(numbers):
            x = inputs(turn, rank, of_rank[rank], dtype)
            with ordinary(buffer):
                want = model(x)
            with watched(buffer) as seen:
                assert_same(model(x), want)
            assert seen == [len(x)] * 2 * (len(x) <= 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
def test_the_same_bits(inference: bool, dtype: torch.dtype) -> None:
    with poisoned():
        run_virtual(any_number, 3, inference, dtype)


@torch.no_grad()
def mixed(group: Any) -> None:
    """Some ranks make ordinary calls where others do not."""
    rank = group.rank()
    with open_buffer(group) as buffer:
        model = make_model(buffer).eval()
        for turn in range(STEPS):
            x = inputs(turn, rank, 3 + rank)
            with ordinary(buffer):
                want = model(x)
            if (turn + rank) % 3:
                assert_same(model(x), want)
            else:
                with ordinary(buffer):
                    assert_same(model(x), want)


def test_other_ranks_may_make_ordinary_calls() -> None:
    run_virtual(mixed, 3)


def keeps_everything(group: Any) -> None:
    """What forward hooks see of every module stays as it was: hidden states of all layers, what
    experts get and give, and the outputs of all steps.
    """
    rank = group.rank()
    with open_buffer(group) as buffer, torch.inference_mode():
        model = make_model(buffer).eval()
        kept: list[tuple[list[Tensor], list[Tensor]]] = []

        def keep(module: Any, given: tuple[Tensor, ...], out: Any) -> None:
            seen = [*given, *(out if isinstance(out, tuple) else [out])]
            kept.append((seen, [one.clone() for one in seen]))

        for module in model.modules():
            module.register_forward_hook(keep)
        x = [inputs(turn, rank, 2 + turn % 3) for turn in range(STEPS)]
        with watched(buffer) as taken:
            for one in x:
                model(one)
        assert len(taken) == 2 * STEPS
        own = kept.copy()
        kept.clear()
        with ordinary(buffer):
            for one in x:
                model(one)
        assert len(own) == len(kept) > 8 * STEPS
        for (seen, copies), (_, want) in zip(own, kept):
            assert_same(seen, copies)
            assert_same(seen, want)


def test_what_hooks_keep_stays() -> None:
    run_virtual(keeps_everything, 2)


def keeps_parts(group: Any) -> None:
    """Whatever holds the memory of rows does: a part, a view as another dtype, an array."""
    rank = group.rank()
    hold: list[Any] = [
        lambda x: x[1:2],
        lambda x: x.view(torch.int32),
        lambda x: x.numpy(),
        lambda x: x.untyped_storage(),
        torch.utils.dlpack.from_dlpack,
        weakref.ref,
    ]
    with open_buffer(group) as buffer, torch.no_grad():
        addresses = []
        for holds in hold:
            kept: list[tuple[Any, Any]] = []

            def experts(x: Tensor, offsets: Tensor, holds: Any = holds, kept: Any = kept) -> Tensor:
                addresses.append(x.data_ptr())
                one = holds(x)
                copy = None if isinstance(one, weakref.ref) else torch.as_tensor(one).clone()
                kept.append((one, copy))
                return x

            for turn in range(STEPS):
                through_experts(buffer, *routed(turn, rank, 4), experts)
            for one, copy in kept:
                if copy is not None:
                    assert_same(torch.as_tensor(one), copy)
        # Whom nobody holds, come again.
        assert len(set(addresses[-STEPS:])) == 2
        assert addresses[-1] == addresses[-3] == addresses[-5]


def test_whoever_holds_a_part_keeps_it() -> None:
    run_virtual(keeps_parts, 2)


def shared(group: Any) -> None:
    """Models of one shape use the same memory; a layer inside another's experts uses another."""
    rank = group.rank()
    with open_buffer(group) as buffer, torch.no_grad():
        models = [make_model(buffer).eval() for _ in range(2)]
        for turn in range(STEPS):
            x = inputs(turn, rank, 3)
            with ordinary(buffer):
                want = [model(x) for model in models]
            assert_same([model(x) for model in models], want)
        few: Any = buffer._few
        assert [len(idle) for idle in few._idle.values()] == [1]

        inner, seen = models[1].moe, []

        def beside(module: Any, given: Any) -> None:
            seen.append(inner(x))

        models[0].moe.experts.register_forward_pre_hook(beside)
        for turn in range(STEPS):
            x = inputs(turn, rank, 3)
            with ordinary(buffer):
                want = [models[0].moe(x)]
            assert_same([models[0].moe(x)], want)
            assert_same(seen[-1], seen[-2])
        assert [len(idle) for idle in few._idle.values()] == [2]


def test_layers_share_what_is_prepared() -> None:
    run_virtual(shared, 2)


def two_threads(group: Any) -> None:
    """Two threads of each rank make their calls by turns, one inside the other's experts."""
    rank, num_calls = group.rank(), 12
    with open_buffer(group) as buffer:
        with torch.no_grad(), ordinary(buffer):
            want = [
                through_experts(buffer, *routed(turn, rank, 3), lambda x, _: x * 2)
                for turn in range(num_calls)
            ]
        got: dict[int, Tensor] = {}
        failed: list[BaseException] = []
        turns, now = threading.Condition(), [0]

        def wait_for(step: int) -> None:
            with turns:
                assert turns.wait_for(lambda: now[0] == step or failed, 60)
                assert not failed

        def done() -> None:
            with turns:
                now[0] += 1
                turns.notify_all()

        # Each pair of calls: dispatch of one, dispatch of the other, combine, combine.
        def work(which: int) -> None:
            try:
                with torch.no_grad():
                    for turn in range(which, num_calls, 2):
                        begin = 4 * (turn // 2) + which

                        def experts(x: Tensor, _: Tensor, begin: int = begin) -> Tensor:
                            done()
                            wait_for(begin + 2)
                            return x * 2

                        wait_for(begin)
                        given = routed(turn, rank, 3)
                        got[turn] = through_experts(buffer, *given, experts)
                        done()
            except BaseException as error:
                failed.append(error)
                done()

        threads = [threading.Thread(target=work, args=[which]) for which in range(2)]
        with watched(buffer) as taken:
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        if failed:
            raise failed[0]
        assert len(taken) == num_calls
        assert_same([got[turn] for turn in range(num_calls)], want)


def test_threads_take_turns() -> None:
    run_virtual(two_threads, 2)


def beside_training(group: Any, generates: bool) -> dict[str, Tensor]:
    """Generation between forward and backward, in the same layers."""
    rank = group.rank()
    with open_buffer(group) as buffer:
        model = make_model(buffer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for turn in range(4):
            loss = model(inputs(turn, rank, 5)).square().sum()
            if generates:
                with torch.no_grad(), watched(buffer) as taken:
                    for more in range(3):
                        model(inputs(10 + more, rank, 2))
                assert len(taken) == 6
            optimizer.zero_grad()
            with watched(buffer) as taken:
                loss.backward()
            assert not taken
            optimizer.step()
        return {name: one.detach() for name, one in model.named_parameters() if "load" not in name}


def test_generation_beside_training() -> None:
    for want, got in zip(*(run_virtual(beside_training, 2, one).results for one in (False, True))):
        assert_same(list(got.values()), list(want.values()))


def with_gradients(group: Any) -> None:
    """What a graph may need goes the ordinary way, also where only the experts are trained."""
    rank = group.rank()
    with open_buffer(group) as buffer:
        model = make_model(buffer).eval()
        model.moe.router.requires_grad_(False)
        with watched(buffer) as taken:
            model.moe(inputs(0, rank, 3)).sum().backward()
        assert not taken
        assert model.moe.experts.down.grad is not None


def test_no_graph_is_lost() -> None:
    run_virtual(with_gradients, 2)


def reopened(group: Any) -> None:
    """A closed Buffer forgets what it has prepared, without a collector, and refuses."""
    outs, x = [], inputs(0, group.rank(), 3)
    for _ in range(2):
        buffer = open_buffer(group)
        model = make_model(buffer).eval()
        with torch.no_grad():
            outs.append([model(x), model(x)])
        few: Any = buffer._few
        ((pair,),) = few._idle.values()
        gone = weakref.ref(pair)
        del pair, few
        gc.disable()  # of all virtual ranks
        buffer.close()
        assert gone() is None
        with torch.no_grad(), pytest.raises(BufferClosed):
            model(x)
    assert_same(outs[0], outs[1])


def test_a_buffer_closed_and_another_opened() -> None:
    try:
        run_virtual(reopened, 2)
    finally:
        gc.enable()


@torch.no_grad()
def rebalanced(group: Any) -> None:
    rank = group.rank()
    with open_buffer(group) as buffer:
        model = make_model(buffer).eval()
        x = inputs(0, rank, 4)
        want = model(x)
        for placement in ([1, 0, 1, 0, 1, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]):
            rebalance_module(model, torch.tensor(placement))
            with ordinary(buffer):
                assert_same(model(x), want)
            with watched(buffer) as taken:
                assert_same(model(x), want)
            assert len(taken) == 2
        buffer.rebalance(torch.tensor([1, 0, 1, 0, 1, 0]))  # and not the model
        with pytest.raises(ValueError, match="was rebalanced"):
            model(x)


def test_experts_may_move() -> None:
    run_virtual(rebalanced, 2)


class Kind(torch.Tensor):
    """A kind of tensor of its own."""


@torch.no_grad()
def unusual(group: Any) -> None:
    """Experts may return what was not prepared."""
    rank = group.rank()
    give: dict[str, Any] = {
        "another dtype": lambda x, _: x.double() * 2,
        "wider": lambda x, _: torch.cat([x, x], 1),
        "a kind of its own": lambda x, _: x.as_subclass(Kind),
        "x itself": lambda x, _: x.mul_(3),
        "with a graph": lambda x, _: x.clone().requires_grad_(),
        "strided": lambda x, _: torch.stack([x, x], 2)[:, :, 1],
    }
    with open_buffer(group) as buffer:
        for turn, experts in enumerate(give.values()):
            for num_tokens in (3, 0):
                given = routed(turn, rank, num_tokens)
                with ordinary(buffer):
                    want = through_experts(buffer, *given, experts)
                with watched(buffer) as taken:
                    assert_same(through_experts(buffer, *given, experts), want)
                assert taken == [num_tokens]


def test_experts_may_return_anything() -> None:
    run_virtual(unusual, 2)


@torch.no_grad()
def bad(group: Any) -> list[str]:
    """One rank gives bad input, in its call or after it; all raise, and all goes on."""
    rank, said = group.rank(), []
    with open_buffer(group) as buffer:
        for _ in range(2):
            for culprit in range(2):
                x, ids, weights, num_experts = routed(0, rank, 3)
                if rank == culprit:  # of its first call
                    ids[1, 1] = NUM_EXPERTS
                is_bad = rank == culprit
                for experts in (lambda x, _: x, lambda x, _, bad=is_bad: x[1:] if bad else x):
                    with pytest.raises(ValueError) as caught:
                        through_experts(buffer, x, ids, weights, num_experts, experts)
                    said.append(str(caught.value))
                    ids = routed(0, rank, 3)[1]
        given = routed(0, rank, 3)
        with ordinary(buffer):
            want = through_experts(buffer, *given, lambda x, _: x)
        assert_same(through_experts(buffer, *given, lambda x, _: x), want)
    return said


def test_bad_input_raises_on_all_ranks() -> None:
    for said in run_virtual(bad, 2).results:
        assert len(said) == 8
        assert all("topk_idx[1, 1] is 6, want -1..5" in one for one in said[::2])


def only_one_trains(group: Any) -> str:
    with open_buffer(group) as buffer:
        model = make_model(buffer).eval()
        with torch.set_grad_enabled(group.rank() == 0), pytest.raises(ValueError) as caught:
            model(inputs(0, group.rank(), 3))
        return str(caught.value)


def test_a_graph_on_one_rank_alone_is_refused() -> None:
    first, second = run_virtual(only_one_trains, 2).results
    assert "requires grad on this rank and not on another" in first
    assert "requires grad on another rank and not on this one" in second


@torch.no_grad()
def looked_at(group: Any) -> None:
    """Compilers, profilers, autocast: the same bits."""
    rank = group.rank()
    with open_buffer(group) as buffer:
        model = make_model(buffer).eval()
        x = inputs(0, rank, 4)
        for device_type in ("cpu", None):
            with torch.autocast("cpu", torch.bfloat16, enabled=device_type == "cpu"):
                with ordinary(buffer):
                    want = model(x)
                with watched(buffer) as taken:
                    assert_same(model(x), want)
                assert taken == [4, 4]
        if rank == 0:  # of all threads
            with torch.profiler.profile(), watched(buffer) as taken:
                assert_same(model(x), want)
            assert not taken
        else:
            assert_same(model(x), want)


def test_whoever_looks_sees_the_operators() -> None:
    run_virtual(looked_at, 2)


def elsewhere(group: Any) -> None:
    with tokenyard.Buffer(group, transport="ring") as buffer, torch.no_grad():
        assert buffer._few is None
        make_model(buffer).eval()(inputs(0, group.rank(), 3))


def test_nothing_is_prepared_where_calls_are_not_compiled() -> None:
    run_virtual(elsewhere, 2)


@torch.no_grad()
def much_comes(group: Any) -> None:
    """Few tokens here, of which more come from elsewhere than one thread should move."""
    rank = group.rank()
    with open_buffer(group) as buffer:
        x = torch.randn(1 if rank else 700, 2048, generator=torch.Generator().manual_seed(rank))
        ids = torch.tensor([[2, 3]]).expand(len(x), 2).contiguous()  # of rank 1
        given = x, ids, torch.full(ids.shape, 0.5), 4
        with ordinary(buffer):
            want = through_experts(buffer, *given, lambda x, _: x * 2)
        with watched(buffer) as taken:
            assert_same(through_experts(buffer, *given, lambda x, _: x * 2), want)
        assert taken == [1] * rank


def test_threads_share_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run_virtual(much_comes, 2)
