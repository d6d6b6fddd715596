"""`tokenyard plan`, `simulate` and `balance`: tables, pictures, pages, JSON and mistakes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tokenyard
from tests.cases.pages import ROOT, consoles_of
from tokenyard import Replicas
from tokenyard.observe.routing import file
from tokenyard.planner.choices import Routing
from tokenyard.planner.cost import Model, imbalance
from tokenyard.planner.presets import MODELS
from tokenyard.planner.simulate import drifting
from tokenyard.testing import run_virtual
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app

RUNNER = CliRunner()
MODEL = Model(name="m", hidden=64, num_experts=16, num_topk=2, intermediate=8, num_layers=1)


def run(*words: object) -> Any:
    return RUNNER.invoke(make_app(COMMANDS), [str(word) for word in words])


def recording(path: Path, num_layers: int = 1) -> Path:
    steps = torch.from_numpy(drifting(20, 64, MODEL, exponent=1.5))
    save_recording(path, [f"layer {number}" for number in range(num_layers)], steps, MODEL)
    return path


def save_recording(path: Path, names: list[str], steps_STK: torch.Tensor, model: Model) -> None:
    """Of two ranks, as tokenyard.record writes it."""
    num_steps, num_tokens, num_topk = steps_STK.shape
    experts = torch.arange(model.num_experts, dtype=torch.int32)
    layers = [
        file.LayerRouting(
            name=name,
            buffer=0,
            order=number,
            num_experts=model.num_experts,
            num_ranks=2,
            hidden=model.hidden,
            dtype="bfloat16",
            ranks=torch.arange(2),
            node_of_rank=torch.zeros(2, dtype=torch.int32),
            rank_of_expert=experts * 2 // model.num_experts,
            step=torch.arange(num_steps),
            num_tokens=torch.full((num_steps, 2), num_tokens // 2),
            topk_idx=steps_STK.reshape(-1, num_topk),
            topk_weights=None,
        )
        for number, name in enumerate(names)
    ]
    file.save(path, layers, 1)


def test_plan(tmp_path: Path) -> None:
    said = run("plan", "--model", "deepseek-v3", "--cluster", "h800", "--ranks", 64)
    assert said.exit_code == 0, said.stderr
    assert said.stdout.startswith("deepseek-v3 on 64 ranks of h800, 4096 tokens a rank, normal")
    dispatch = next(line for line in said.stdout.splitlines() if line.startswith("dispatch"))
    assert dispatch.split()[2] == "network"
    told = json.loads(run("plan", "--json", "--skew", 1.0).stdout)
    assert told["num_ranks"] == 64
    assert told["imbalance"] > 2
    assert told["seconds"] == pytest.approx(sum(one["seconds"] for one in told["stages"]))


def test_sweep_is_drawn_and_written(tmp_path: Path) -> None:
    png, html = tmp_path / "sweep.png", tmp_path / "sweep.html"
    said = run("plan", "--sweep", "--ranks", 128, "--low-latency", "--png", png, "--html", html)
    assert said.exit_code == 0, said.stderr
    rows = [line.split() for line in said.stdout.splitlines() if line[:5].strip().isdigit()]
    assert [int(row[0]) for row in rows] == [2, 4, 8, 16, 32, 64, 128]
    assert [row[-1] for row in rows][-1] == "network"
    assert png.read_bytes()[:4] == b"\x89PNG"
    page = html.read_text()
    assert page.count("<svg") == 1
    # It needs no other file: nothing is fetched.
    assert not any(word in page for word in ("<script", "<link", "src=", "@import", "url(http"))


def test_simulate(tmp_path: Path) -> None:
    path, png = recording(tmp_path / "routing.pt"), tmp_path / "replay.png"
    options = ("--ranks", 4, "--spare", 4, "--every", 5, "--png", png)
    said = run("simulate", path, *options)
    assert said.exit_code == 0, said.stderr
    even, rebalanced = (
        line.split() for line in said.stdout.splitlines() if line.startswith(("even", "rebal"))
    )
    assert float(rebalanced[3]) < float(even[3])
    assert png.exists()
    told = json.loads(run("simulate", path, "--ranks", 4, "--json").stdout)
    assert told["even"]["steps"] == 20


def test_balance_saves_and_changes_a_placement(tmp_path: Path) -> None:
    loads, saved = tmp_path / "loads.pt", tmp_path / "placement.json"
    torch.save(torch.arange(1.0, 33.0).reshape(2, 16), loads)
    html = tmp_path / "balance.html"
    said = run("balance", loads, "--ranks", 4, "--spare", 4, "--save", saved, "--html", html)
    assert said.exit_code == 0, said.stderr
    files = [tmp_path / "placement.0.json", tmp_path / "placement.1.json"]
    assert [Replicas.load(path).num_slots for path in files] == [20, 20]
    assert html.exists()
    torch.save(torch.arange(1.0, 33.0).flip(0).reshape(2, 16), loads)
    told = json.loads(run("balance", loads, "--current", saved, "--want", 1.05, "--json").stdout)
    assert all(one["after"] <= 1.05 for one in told)
    assert len(told[0]["moves"]) < 20
    grouped = run("balance", loads, "--ranks", 4, "--nodes", 2, "--groups", 4, "--json")
    slots = np.array(json.loads(grouped.stdout)[0]["experts"]).reshape(2, -1)
    assert not set(slots[0] // 4) & set(slots[1] // 4)
    said = run("balance", loads, "--ranks", 4, "--spare", 4, "--nodes", 2, "--html", html)
    assert said.stdout.startswith("16 experts in 20 slots of 4 ranks on 2 nodes, by loads.pt")
    said = run("balance", loads, "--ranks", 4, "--nodes", 3)
    assert "4 ranks on 3 nodes: want as many ranks on each" in said.stderr


def test_a_buffer_takes_what_balance_saves(tmp_path: Path) -> None:
    """A placement for each of two layers: rows are as even as `balance` says."""
    loads, saved = tmp_path / "loads.pt", tmp_path / "placement.json"
    drawn = [drifting(1, 4 * 1024, MODEL, exponent)[0] for exponent in (1.0, 1.5)]
    topk_idx = [torch.from_numpy(one).long() for one in drawn]
    torch.save(torch.stack([one.flatten().bincount(minlength=16) for one in topk_idx]), loads)
    said = run("balance", loads, "--ranks", 4, "--spare", 8, "--save", saved, "--json")
    assert said.exit_code == 0, said.stderr
    placements = [Replicas.load(tmp_path / f"placement.{layer}.json") for layer in range(2)]

    def job(group: Any) -> list[int]:
        rows = []
        with tokenyard.Buffer(group, placement=placements[0]) as buffer:
            for layer, placement in enumerate(placements):
                moves = buffer.rebalance(placement)
                assert len(moves) == (0 if layer == 0 else len(placements[0].moves(placement)))
                mine = topk_idx[layer].chunk(4)[group.rank()].contiguous()
                x, weights = torch.ones(len(mine), 64), torch.ones(mine.shape)
                got = buffer.dispatch(x, topk_idx=mine, topk_weights=weights, num_experts=16)
                rows.append(sum(got.num_recv_tokens_per_expert_list))
        return rows

    for layer, rows_R in enumerate(zip(*run_virtual(job, 4).results)):
        told = json.loads(said.stdout)[layer]
        assert sum(rows_R) == topk_idx[layer].numel()
        # Copies take turns, and so do not share to the row.
        assert imbalance(np.array(rows_R)) == pytest.approx(told["after"], abs=0.03)
        assert told["after"] < 1.05 < 1.1 < told["before"]


def test_balance_takes_a_recording(tmp_path: Path) -> None:
    path = recording(tmp_path / "routing.pt", 2)
    said = run("balance", path, "--ranks", 4, "--json")
    assert [one["after"] <= one["before"] for one in json.loads(said.stdout)] == [True, True]


def test_without_ranks_a_recording_is_taken_as_it_ran(tmp_path: Path) -> None:
    """On two ranks; a tensor of loads says nothing, and is for eight."""
    path = recording(tmp_path / "routing.pt")
    assert "16 experts in 16 slots of 2 ranks" in run("balance", path).stdout
    by_default = run("simulate", path, "--json").stdout
    assert json.loads(by_default) == json.loads(
        run("simulate", path, "--ranks", 2, "--json").stdout
    )
    torch.save(torch.ones(16), tmp_path / "loads.pt")
    assert "16 experts in 16 slots of 8 ranks" in run("balance", tmp_path / "loads.pt").stdout


@pytest.mark.parametrize(
    "words, want",
    [
        (["plan", "--model", "gpt"], "tokenyard: unknown model 'gpt'; available: deepseek-v3,"),
        (["plan", "--cluster", "h9"], "tokenyard: unknown cluster 'h9'; available: h800,"),
        (["plan", "--tokens", "0"], "tokenyard: num_tokens is 0, want at least 1"),
        (["simulate", "none.pt"], "tokenyard: none.pt is missing, and there is no part"),
        (["balance", "none.pt"], "tokenyard: [Errno 2] No such file or directory: 'none.pt'"),
        (["plan", "--png", "nowhere/x.png"], "tokenyard: [Errno 2] No such file or directory"),
        (["plan", "--png", "x.doc"], "tokenyard: Format 'doc' is not supported"),
    ],
    ids=lambda value: value[1] + value[2] if isinstance(value, list) and value[2:] else "",
)
def test_mistakes_are_told_in_one_line(
    words: list[str], want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run(*words)
    assert said.exit_code == 2
    assert said.stderr.startswith(want)
    assert said.stderr.count("\n") == 1


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": 1}, path)
    for command in ("simulate", "balance"):
        said = run(command, path)
        assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
        assert "is not a recording of tokenyard.record" in said.stderr
    said = run("simulate", recording(path, 2))
    assert "has 2 layers, want --layer, one of layer 0, layer 1" in said.stderr
    torch.save(torch.ones(16), tmp_path / "loads.pt")
    said = run("balance", tmp_path / "loads.pt", "--current", path)
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
    assert "want a file of Replicas.save" in said.stderr
    said = run("balance", tmp_path / "loads.pt", "--current", path, "--ranks", 4)
    assert "leave out --ranks" in said.stderr
    torch.save(torch.ones(2, 2, 2), path)
    assert "has shape [2, 2, 2], want [experts]" in run("balance", path).stderr


@pytest.mark.slow
def test_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/guide/planning.md: every command runs, and prints what is shown."""
    monkeypatch.chdir(tmp_path)
    model = MODELS["deepseek-v3"]
    steps = torch.from_numpy(drifting(120, 1024, model))
    save_recording(Path("routing.pt"), ["layers.3.mlp"], steps, model)
    torch.save(torch.from_numpy(Routing.zipf(256, 8).load), "loads.pt")
    page = ROOT / "docs" / "guide" / "planning.md"
    commands = [one for console in consoles_of(page) for one in console.commands]
    assert len(commands) == 7
    for command in commands:
        said = run(*shlex.split(command.line)[1:])
        assert said.exit_code == 0, said.stderr
        lines = [line.rstrip() for line in said.stdout.splitlines()]
        assert lines == command.shown.rstrip().splitlines(), command.line
