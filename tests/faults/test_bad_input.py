"""Bad input on one rank raises on all of them, with its text, at once; and the group works on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.bad_input import (
    CASES,
    CULPRIT,
    GROUP,
    NUM_EXPERTS,
    NUM_RANKS,
    Scene,
    Step,
    good_input,
    new_buffer,
)
from tests.cases.processes import Pools
from tests.cases.told import (
    Outcome,
    attempt,
    caught,
    check_told,
    check_works_on,
    expected,
    job,
    round_trip,
)
from tokenyard import Buffer, BufferClosed, CallMismatch, PeerInputError, PeerTimeout
from tokenyard.testing import assert_same, run_virtual

Run = Callable[..., list[Any]]  # run(job, *args): what each rank returned


@pytest.fixture(params=["virtual", pytest.param("processes", marks=pytest.mark.processes)])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "processes":
        return request.getfixturevalue("processes")(NUM_RANKS).run
    return lambda job, *args: run_virtual(job, NUM_RANKS, *args).results


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told_and_go_on(run: Run, name: str) -> None:
    outcomes = run(job, name)
    for rank, outcome in enumerate(outcomes):
        check_told(CASES[name], rank, outcome)
    check_works_on(outcomes)


def open_on_destroyed(group: Any) -> list[str]:
    import torch.distributed as dist

    texts = []
    part = dist.new_group(range(NUM_RANKS))
    dist.destroy_process_group(part)
    for _ in range(2):
        with pytest.raises(ValueError, match="want") as caught:
            Buffer(part)
        texts.append(str(caught.value))
    return texts


@pytest.mark.processes
def test_a_destroyed_group_is_called_so(processes: Pools) -> None:
    for texts in processes(NUM_RANKS).run(open_on_destroyed):
        assert texts == [
            "group was destroyed (destroy_process_group), or is unknown to torch.distributed, "
            + GROUP
        ] * len(texts)


def handles_in_short(group: Any) -> tuple[str, str]:
    with new_buffer(group, low_latency_mode=True) as buffer:
        given = good_input(buffer.rank)
        got = buffer.dispatch(**given, num_experts=NUM_EXPERTS)
        x, topk_idx = given["x"], given["topk_idx"]
        slots = buffer.low_latency_dispatch(x, topk_idx, 8, NUM_EXPERTS, use_fp8=False)
        return repr(got.handle), repr(slots.handle)


def test_a_handle_shows_shapes_and_no_contents(run: Run) -> None:
    for rank, (handle, slots) in enumerate(run(handles_in_short)):
        tokens, rows = len(good_input(rank)["x"]), len(expected()[rank][0])
        assert handle == (
            f"<tokenyard.Handle of dispatch call 0: {tokens} tokens sent, {rows} rows received, "
            "hidden 8, 10 channels>"
        )
        assert slots == (
            f"<tokenyard.LowLatencyHandle of dispatch call 1: {tokens} tokens sent, 2 experts of "
            "24 slots, hidden 8>"
        )


def two_culprits(group: Any) -> Outcome:
    scene = Scene(group)
    every: list[dict[str, Any]] = [{}, {"expert_alignment": 0}, {"topk_idx": None}]
    wrong = every[scene.rank]
    return attempt(scene, lambda s: s.dispatch(**wrong))


def test_each_culprit_sees_its_own_mistake_and_the_others_that_of_the_lowest(run: Run) -> None:
    outcomes = run(two_culprits)
    own = "dispatch: expert_alignment is 0, want at least 1, on rank 1"
    assert [outcome.text for outcome in outcomes] == [
        f"rank 1 rejected its input, so no rank went on: {own}",
        own,
        "dispatch: topk_weights is given alone, want topk_idx and topk_weights together or "
        "neither, on rank 2",
    ]
    assert [outcome.kind for outcome in outcomes] == [PeerInputError, ValueError, ValueError]
    check_works_on(outcomes)


def long_story(group: Any) -> Outcome:
    scene = Scene(group)
    wrong = {"transport": "é" * 1000} if scene.rank == CULPRIT else {}
    return attempt(scene, lambda s: s.open(**wrong))


def test_the_others_are_told_the_beginning_of_a_long_text(run: Run) -> None:
    outcomes = run(long_story)
    own = outcomes[CULPRIT].text
    assert len(own) > 1000
    begin = own.encode()[:504].decode(errors="replace")
    for rank in {*range(NUM_RANKS)} - {CULPRIT}:
        told = f"rank {CULPRIT} rejected its input, so no rank went on: {begin}"
        assert outcomes[rank].text == told
    check_works_on(outcomes)


CLOSED_CALLS: dict[str, Step] = {
    "dispatch": Scene.dispatch,
    "cached-dispatch": Scene.cached,
    "combine": Scene.combine,
    "layout": lambda s: s.buffer.get_dispatch_layout(s.topk_idx, NUM_EXPERTS),
}


def call_closed(group: Any, name: str) -> tuple[type, str, list[Any]]:
    scene = Scene(group)
    scene.buffer.close()
    scene.buffer.close()  # twice is fine
    error = caught(CLOSED_CALLS[name], scene)
    return type(error), str(error), round_trip(new_buffer(group))


@pytest.mark.parametrize("name", CLOSED_CALLS)
def test_a_closed_buffer_says_so_and_the_group_works_on(run: Run, name: str) -> None:
    for rank, (kind, text, afterwards) in enumerate(run(call_closed, name)):
        assert (kind, text) == (BufferClosed, f"the Buffer is closed, on rank {rank}")
        assert_same(afterwards, expected()[rank], f"rank {rank}: afterwards")


def test_errors_cross_processes() -> None:
    for error in (
        PeerInputError("rank 2 rejected its input", rank=2, stage="dispatch"),
        PeerTimeout("no word from rank 1", ranks=(1, 3), stage="combine"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), copy.rank, copy.stage) == (str(error), error.rank, error.stage)
    copy = pickle.loads(pickle.dumps(CallMismatch("ranks differ", what="hidden")))
    assert (str(copy), copy.what) == ("ranks differ", "hidden")
