"""tokenyard.record: every dispatch is noted, once, of all ranks, in one file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tests.cases.clock import scaled
from tests.cases.nn import moe as jobs
from tests.cases.processes import Pools
from tests.cases.programs import run_python
from tokenyard.observe import recording, routing
from tokenyard.observe.routing import file
from tokenyard.testing import Processes, assert_same, run_virtual
from tokenyard.testing import routing as random_routing
from tokenyard.topology import even_split

EXPERTS, TOPK, HIDDEN = 6, 3, 32


def drawn(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Ranks have different numbers of tokens, one of them none."""
    num_tokens = 0 if rank == 1 and step == 2 else 3 + rank + step
    return random_routing("holes", num_tokens, TOPK, EXPERTS, seed=10 * step + rank)


def dispatch(buffer: Any, kind: str, rank: int, step: int) -> None:
    topk_idx, weights = drawn(rank, step)
    x = torch.ones(len(topk_idx), HIDDEN, dtype=torch.bfloat16)
    if kind == "plain":
        got = buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=EXPERTS)
        buffer.dispatch(x, handle=got.handle)  # the same way again: it is no other routing
    elif kind == "layout":
        layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        buffer.dispatch(x, None, layout[0], layout[1], layout[3], layout[2], topk_idx, weights)
    elif kind == "asynchronous":
        given: Any = {"topk_idx": topk_idx, "topk_weights": weights, "num_experts": EXPERTS}
        buffer.dispatch(x, **given, async_finish=True).event.current_stream_wait()
    elif kind == "by_expert":
        buffer.dispatch_by_expert(x, topk_idx, weights, num_experts=EXPERTS)
    elif kind == "elastic":
        buffer.dispatch(x, topk_idx, weights, num_experts=EXPERTS)
    else:
        x = torch.ones(len(topk_idx), 128, dtype=torch.bfloat16)
        hook = kind == "hook"
        got = buffer.low_latency_dispatch(x, topk_idx, 16, EXPERTS, return_recv_hook=hook)
        if hook:
            got.hook()


def record_job(group: Any, path: Path, kind: str, num_steps: int = 4) -> None:
    options: Any = {"low_latency_mode": kind in ("low_latency", "hook")}
    make = tokenyard.ElasticBuffer if kind == "elastic" else tokenyard.Buffer
    with make(group, **options if make is tokenyard.Buffer else {}) as buffer:
        with tokenyard.record(path, weights=True):
            for step in range(num_steps):
                dispatch(buffer, kind, group.rank(), step)
        dispatch(buffer, kind, group.rank(), 9)  # too late


def check(path: Path, num_ranks: int, weights: bool = True, num_steps: int = 4) -> None:
    (layer,) = routing.load(path)
    assert layer.ranks.tolist() == list(range(num_ranks))
    assert layer.step.tolist() == list(range(num_steps))
    each = [drawn(rank, step) for step in range(num_steps) for rank in range(num_ranks)]
    assert layer.num_tokens.flatten().tolist() == [len(ids) for ids, _ in each]
    assert_same(layer.topk_idx, torch.cat([ids for ids, _ in each]).to(torch.int16))
    if weights:
        assert_same(layer.topk_weights, torch.cat([one for _, one in each]).half())
    else:
        assert layer.topk_weights is None
    assert layer.rank_of_expert.tolist() == even_split(EXPERTS, num_ranks)


@pytest.mark.parametrize(
    "kind",
    ["plain", "layout", "asynchronous", "by_expert", "elastic", "low_latency", "hook"],
)
def test_virtual_ranks_write_one_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "routing.pt"
    run_virtual(record_job, 3, path, kind)
    check(path, 3, weights=kind not in ("low_latency", "hook"))
    assert os.listdir(tmp_path) == ["routing.pt"]
    assert recording.active is None


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["plain", "low_latency"])
def test_processes_write_one_file(processes: Pools, tmp_path: Path, kind: str) -> None:
    """Their calls are compiled as a whole."""
    path = tmp_path / "routing.pt"
    for _ in range(2):  # the second run replaces the file of the first
        processes(2).run(record_job, path, kind)
        check(path, 2, weights=kind == "plain")
    assert os.listdir(tmp_path) == ["routing.pt"]


def test_a_missing_rank_leaves_parts_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    run_virtual(record_job, 3, path, "plain")
    (whole,) = routing.load(path)
    parts = split(whole)
    path.unlink()
    for part in parts[:2]:
        rank = int(part.ranks[0])
        file.save(file.part_path(path, "ab", rank, 3), [part], 1)
    (found,) = routing.load(path)
    assert found.ranks.tolist() == [0, 1]
    assert not found.is_complete
    file.save(tmp_path / "third.pt", [parts[2]], 1)
    (joined,) = routing.load(path, tmp_path / "third.pt")
    for name, value in vars(whole).items():
        if isinstance(value, Tensor):
            assert_same(getattr(joined, name), value)


def split(whole: routing.LayerRouting) -> list[routing.LayerRouting]:
    """The parts that processes of one rank each would have written."""
    begins, made = file.begins_of(whole), []
    for rank in range(whole.num_ranks):
        rows = [
            torch.arange(begin, begin + count)
            for begin, count in zip(begins[:, rank].tolist(), whole.num_tokens[:, rank].tolist())
        ]
        made.append(
            replace(
                whole,
                ranks=torch.tensor([rank]),
                num_tokens=whole.num_tokens[:, rank : rank + 1],
                topk_idx=whole.topk_idx[torch.cat(rows)],
                topk_weights=whole.topk_weights[torch.cat(rows)],
            )
        )
    return made


def test_layers_are_named_as_the_model_names_them(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    chosen: dict[tuple[str, int], list[Tensor]] = {}

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            model = jobs.make_model(buffer)
            for name in ("moe", "second"):
                kept = chosen.setdefault((name, group.rank()), [])

                def keep(_m: Any, _i: Any, out: Any, kept: list[Tensor] = kept) -> None:
                    kept.append(out.topk_idx)

                getattr(model, name).router.register_forward_hook(keep)
            x = jobs.tokens(group.rank(), group.size())
            with tokenyard.record(path):
                for step in range(3):
                    jobs.loss_of(model, x + step).backward()

    run_virtual(job, 2)
    layers = routing.load(path)
    assert [layer.name for layer in layers] == ["moe", "second"]
    for layer in layers:
        assert layer.step.tolist() == [0, 1, 2]
        by_step = [chosen[layer.name, rank][step] for step in range(3) for rank in range(2)]
        assert_same(layer.topk_idx, torch.cat(by_step).to(torch.int16))
        assert (layer.hidden, layer.dtype) == (jobs.HIDDEN, "float32")


def test_activation_checkpointing_is_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"

    def job(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer, tokenyard.record(path):
            layer = jobs.make_model(buffer).moe
            x = jobs.tokens(group.rank(), group.size()).requires_grad_()
            for _ in range(2):
                checkpoint(layer, x, use_reentrant=False).sum().backward()

    run_virtual(job, 2)
    (layer,) = routing.load(path)
    assert (layer.name, layer.num_steps) == ("MoE", 2)


def test_layers_that_are_no_modules(tmp_path: Path) -> None:
    def in_layers(group: Any, notes: recording.Recording) -> None:
        with tokenyard.Buffer(group) as buffer:
            for step in range(2):
                for name in ("up", "down"):
                    with notes.layer(name):
                        dispatch(buffer, "by_expert", group.rank(), step)

    with tokenyard.record(tmp_path / "named.pt") as notes:
        run_virtual(in_layers, 2, notes)

    def in_turns(group: Any) -> None:
        with tokenyard.Buffer(group) as buffer:
            for step in range(4):
                dispatch(buffer, "by_expert", group.rank(), step)

    with tokenyard.record(tmp_path / "turns.pt", layers=2):
        run_virtual(in_turns, 2)

    named = routing.load(tmp_path / "named.pt")
    assert [(layer.name, layer.num_steps) for layer in named] == [("up", 2), ("down", 2)]
    turns = routing.load(tmp_path / "turns.pt")
    assert [layer.name for layer in turns] == ["buffer 0", "buffer 0 (2)"]
    for number, layer in enumerate(turns):
        each = [drawn(rank, step)[0] for step in (number, number + 2) for rank in range(2)]
        assert_same(layer.topk_idx, torch.cat(each).to(torch.int16))


def bounded_job(group: Any, path: Path, num_steps: int, **options: Any) -> int:
    with tokenyard.Buffer(group) as buffer, tokenyard.record(path, **options) as notes:
        for step in range(num_steps):
            dispatch(buffer, "by_expert", group.rank(), step)
        return notes.num_bytes


@pytest.mark.parametrize(
    "options, want",
    [
        ({"every": 3}, [0, 3, 6, 9]),
        ({"most_steps": 4}, [0, 4, 8]),
        ({"most_steps": 4, "every": 2}, [0, 4, 8]),
        ({"most_bytes": 500}, [0, 4, 8]),
    ],
    ids=["every", "most_steps", "both", "most_bytes"],
)
def test_memory_is_bounded(tmp_path: Path, options: dict[str, int], want: list[int]) -> None:
    path = tmp_path / "routing.pt"

    def job(group: Any) -> int:
        return bounded_job(group, path, 12, **options)

    taken = run_virtual(job, 2).results
    (layer,) = routing.load(path)
    assert layer.step.tolist() == want
    each = [drawn(rank, step)[0] for step in want for rank in range(2)]
    assert_same(layer.topk_idx, torch.cat(each).to(torch.int16))
    assert max(taken) <= options.get("most_bytes", 1 << 20)


def test_notes_can_be_read_while_a_program_runs(tmp_path: Path) -> None:
    """As a server leaves them that is killed: the parts are there, the file is not."""
    path = tmp_path / "routing.pt"

    def job(group: Any, notes: recording.Recording) -> None:
        with tokenyard.Buffer(group) as buffer:
            dispatch(buffer, "by_expert", group.rank(), 0)
            if group.rank() == 0:
                notes.write_part()

    with tokenyard.record(path) as notes:
        for step in (1, 2):  # two Buffers, of which the first has ended
            run_virtual(job, 1, notes)
            assert not path.exists()
            assert len(routing.load(path)) == step
    assert os.listdir(tmp_path) == ["routing.pt"]
    assert [layer.name for layer in routing.load(path)] == ["buffer 0", "buffer 1"]


PROGRAM = """
import torch, tokenyard
with tokenyard.Buffer(tokenyard.local_group()) as buffer:
    for step in range(5):
        topk_idx = torch.tensor([[step, 5]])
        buffer.dispatch_by_expert(torch.ones(1, 8), topk_idx, torch.ones(1, 2), num_experts=6)
"""


@pytest.mark.processes
def test_the_environment_asks_for_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "routing.pt"
    asked: Any = {"TOKENYARD_RECORD": str(path), "TOKENYARD_RECORD_EVERY": "2"}
    done = run_python("-c", PROGRAM, **asked)
    assert done.returncode == 0, done.stderr
    (layer,) = routing.load(path)
    assert layer.step.tolist() == [0, 2, 4]
    assert layer.topk_idx.tolist() == [[0, 5], [2, 5], [4, 5]]


def test_mistakes(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="is no folder, want one"),
        tokenyard.record(tmp_path / "none" / "routing.pt"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="every is 0, want a number of at least 1"),
        tokenyard.record(tmp_path / "routing.pt", every=0),
    ):
        pass
    with (
        tokenyard.record(tmp_path / "one.pt"),
        pytest.raises(ValueError, match=r"a recording to .*one\.pt is on already"),
        tokenyard.record(tmp_path / "two.pt"),
    ):
        pass
    assert not list(tmp_path.iterdir()), "nothing was dispatched"


@pytest.mark.parametrize("kind", ["plain", "layout", "low_latency"])
def test_experts_with_copies_are_recorded_as_routers_chose_them(tmp_path: Path, kind: str) -> None:
    copies = tokenyard.Replicas([[0, 1, 0], [2, 3, 0]])
    topk_idx = torch.tensor([[3, 0], [2, 1], [0, 2]])

    def job(group: Any) -> None:
        x = torch.ones(3, 128, dtype=torch.bfloat16)
        weights = torch.ones(3, 2)
        options: Any = {"placement": copies, "low_latency_mode": kind == "low_latency"}
        with (
            tokenyard.Buffer(group, **options) as buffer,
            tokenyard.record(tmp_path / "routing.pt"),
        ):
            if kind == "low_latency":
                buffer.low_latency_dispatch(x, topk_idx, 8, 4, use_fp8=False)
            elif kind == "layout":
                has = buffer.get_dispatch_layout(topk_idx, 4)
                buffer.dispatch(x, None, has[0], has[1], has[3], has[2], topk_idx, weights)
            else:
                buffer.dispatch(x, topk_idx=topk_idx, topk_weights=weights, num_experts=4)

    run_virtual(job, 2)
    (layer,) = routing.load(tmp_path / "routing.pt")
    assert_same(layer.topk_idx, topk_idx.repeat(2, 1).to(torch.int16))
    assert layer.rank_of_expert.tolist() == [0, 0, 1, 1]  # of first copies


def _finish(got: Any) -> None:
    got.event.current_stream_wait()


def refused_on_one_rank(group: Any, path: Path) -> None:
    with tokenyard.Buffer(group, low_latency_mode=True) as buffer, tokenyard.record(path):
        for num_topk in (3, 4):
            ids = torch.zeros(2, num_topk, dtype=torch.int64) + torch.arange(num_topk)
            x: Any = None if group.rank() == num_topk - 3 else torch.ones(2, 128).bfloat16()
            with pytest.raises((ValueError, tokenyard.PeerInputError)):
                _finish(buffer.low_latency_dispatch(x, ids, 8, 4, async_finish=True))
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        buffer.low_latency_dispatch(x, ids, 8, 4)


@pytest.mark.processes
def test_calls_that_one_rank_refused_are_no_trouble(processes: Pools, tmp_path: Path) -> None:
    processes(2).run(refused_on_one_rank, tmp_path / "routing.pt")
    layers = routing.load(tmp_path / "routing.pt")
    assert {(layer.num_topk, *layer.ranks.tolist()) for layer in layers} == {
        (3, 1),
        (4, 0),
        (4, 1),
    }


def opened_in(group: Any, folder: str) -> str:
    if group.rank() == 1:
        os.environ["TOKENYARD_RECORD"] = f"{folder}/missing/routing.pt"
    try:
        with tokenyard.Buffer(group, timeout=scaled(30)):
            return "opened"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("TOKENYARD_RECORD", None)


@pytest.mark.processes
def test_a_folder_that_one_machine_lacks_is_told_to_all(tmp_path: Path) -> None:
    with Processes(2, timeout=scaled(60)) as ranks:
        other, lacks = ranks.run(opened_in, str(tmp_path))
        assert other.startswith("PeerInputError: "), other
        assert "missing" in other
        assert "missing" in lacks
        assert not lacks.startswith("Peer"), lacks
        assert ranks.run(opened_in, str(tmp_path)) == [other, lacks]  # not only the first time
