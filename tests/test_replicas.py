"""Replicas: which experts lie where, what is refused, and what moves from whom to whom."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cases.replicas import SLOTS
from tokenyard import Replicas, spec
from tokenyard.engine import choice
from tokenyard.engine.choice import Choice
from tokenyard.replicas import Move, Slot
from tokenyard.testing import assert_same


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = Replicas([[0, 1, 2], [], [2, 0]])
    saved.save(tmp_path / "replicas.json")
    assert Replicas.load(tmp_path / "replicas.json") == saved


@pytest.mark.parametrize("content", [b"{}", b"[1]", b"no json", b'{"kind": "else"}', b"\xff"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"want a file of Replicas\.save"):
        Replicas.load(path)


@pytest.mark.parametrize(
    "slots, num_experts, message",
    [
        ([[], []], None, "no slots"),
        ([[0], [2]], None, "no slot holds expert 1, want every expert on some rank"),
        ([[0, 1]], 1, r"slot 1 of rank 0 holds expert 1, want 0\.\.0"),
        ([[0], [-1]], None, r"slot 0 of rank 1 holds expert -1, want 0\.\.0"),
    ],
)
def test_what_is_refused(slots: list[list[int]], num_experts: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Replicas(slots, num_experts)


def test_counts_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts have shape \[3\], want \[4\], one a slot"):
        Replicas([[0, 1], [0, 2]]).sum([1, 2, 3])


def test_a_rank_takes_experts_from_itself_then_from_its_node() -> None:
    before = Replicas([[0, 1], [2, 3], [0, 4], [5, 1]])
    after = Replicas([[1, 2], [0, 3], [4, 1], [5, 0]])
    moves = before.moves(after, node_of_rank=[0, 0, 1, 1])
    assert moves.between_ranks == (
        Move(2, Slot(1, 0), Slot(0, 1)),
        Move(0, Slot(0, 0), Slot(1, 0)),
        Move(1, Slot(3, 1), Slot(2, 1)),
        Move(0, Slot(2, 0), Slot(3, 1)),
    )
    assert moves.sources[0][0] == Slot(0, 1)  # it stays, in another slot
    assert str(moves).splitlines()[0] == "expert 2 from rank 1 to rank 0"
    assert len(before.moves(before)) == 0


def test_other_experts_cannot_be_moved_to() -> None:
    with pytest.raises(ValueError, match="3 experts on 1 ranks, want 2 on 1, as before"):
        Replicas([[0, 1]]).moves(Replicas([[0, 1, 2]]))


@pytest.mark.parametrize("num_ranks", SLOTS)
@pytest.mark.parametrize("per_node", [1, 2, 8])
@pytest.mark.parametrize("most", [choice._MOST_CHOICES, 0], ids=["table", "computed"])
def test_the_choice_of_copies_equals_spec(
    num_ranks: int, per_node: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_MOST_CHOICES", most)
    nodes = tuple(rank // per_node for rank in range(num_ranks))
    world = spec.ReplicaWorld(SLOTS[num_ranks], nodes)
    generator = torch.Generator().manual_seed(num_ranks)
    for rank in range(num_ranks):
        chosen = Choice(Replicas(SLOTS[num_ranks]), rank, nodes)
        for num_tokens in (0, 5, 21):
            topk_idx = torch.randint(-1, 6, (num_tokens, 4), generator=generator)
            assert_same(chosen(topk_idx), spec.choose(topk_idx, rank, world), f"rank {rank}")


@pytest.mark.parametrize("bad", [-2, 6, 1 << 40])
def test_experts_that_do_not_exist_are_named(bad: int) -> None:
    chosen = Choice(Replicas(SLOTS[2]), 0, [0, 0])
    with pytest.raises(ValueError, match=rf"topk_idx\[1, 0\] is {bad}, want -1\.\.5"):
        chosen(torch.tensor([[0, 1], [bad, 2]]))


def test_tokens_are_spread_over_the_copies_of_a_node() -> None:
    """And no token leaves a node that has a copy."""
    replicas = Replicas([[0], [0], [0], [1]])
    counts = Choice(replicas, 1, [0, 0, 1, 1])(torch.zeros(100, 1, dtype=torch.int64))
    assert counts.flatten().bincount(minlength=4).tolist() == [50, 50, 0, 0]
    there = Choice(replicas, 0, [0, 0, 1, 1])(torch.ones(100, 1, dtype=torch.int64))
    assert there.unique().tolist() == [3]
