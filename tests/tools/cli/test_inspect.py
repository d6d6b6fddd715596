"""tokenyard inspect: what it says of a recording, what it writes, and a user's mistakes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.cases.recorded import recorded
from tokenyard.observe.routing import LayerRouting, file
from tokenyard.observe.routing.figures import figures_of
from tokenyard.observe.routing.report import report_of
from tokenyard.tools.cli.app import COMMANDS
from tokenyard.tools.cli.group import make_app


def run(*words: object) -> Result:
    return CliRunner().invoke(make_app(COMMANDS), ["inspect", *map(str, words)])


@pytest.fixture
def skewed() -> LayerRouting:
    return recorded("skewed", num_steps=8, num_tokens=40, num_experts=16)


@pytest.fixture
def path(tmp_path: Path, skewed: LayerRouting) -> Path:
    made = tmp_path / "routing.pt"
    file.save(made, [skewed, recorded("uniform", name="second", order=1, num_experts=16)], 1)
    return made


def test_a_skewed_routing_is_called_out(path: Path, skewed: LayerRouting) -> None:
    said = run(path, "--layer", "moe")
    assert said.exit_code == 0
    load = figures_of(skewed).load
    ratio = load[0] / load.mean()
    assert re.search(
        r"Skewed: rank 0 computes \d\.\d\d x the mean \(\d+ % of all rows", said.output
    )
    assert f"Hot experts: 0 ({ratio:.1f} x the mean, on rank 0)" in said.output
    assert "traffic of a step" in said.output
    assert "imbalance of ranks over steps" in said.output


def test_layers_together_name_the_worst(path: Path) -> None:
    said = run(path)
    assert "2 layers: 3 steps" in said.output
    assert "The worst layer is moe: rank 0" in said.output
    assert "second" in said.output


def test_the_page_has_the_table_of_layers_that_is_printed(path: Path, tmp_path: Path) -> None:
    said = run(path, "--html", tmp_path / "routing.html").output
    page = (tmp_path / "routing.html").read_text()
    columns, rows = report_of(file.load(path)).table_of_layers()
    assert [row[0] for row in rows] == ["moe", "second"]
    for row in (columns, *rows):
        assert re.search(r"\s+".join(map(re.escape, row)), said)
        assert re.search("</t[hd]><t[hd]>".join(map(re.escape, row)), page)


def test_a_balanced_routing_is_said_to_be_so(tmp_path: Path) -> None:
    file.save(tmp_path / "even.pt", [recorded("uniform", num_tokens=500)], 1)
    said = run(tmp_path / "even.pt")
    assert "Ranks are balanced" in said.output
    assert "Hot" not in said.output


def test_json_at_other_ranks(path: Path, skewed: LayerRouting) -> None:
    said = json.loads(run(path, "--ranks", 8, "--nodes", 4, "--hidden", 7168, "--json").output)
    first = said["layers"][0]
    want = figures_of(skewed, 8, 4, 7168)
    assert first == want.as_dict()
    assert first["row_bytes"] == 7168 * 2
    assert (said["together"]["ranks"], said["together"]["nodes"]) == (8, 4)
    assert said["findings"][0]["level"] == "bad"


class _Page(HTMLParser):
    """Notes what a page would load, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect", "circle", "polyline"):
            self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.tags.pop() == tag


def test_a_page_of_its_own(tmp_path: Path) -> None:
    """Valid, of one file, with every bar, and with names that are no markup."""
    made = recorded("skewed", name="<b>moe</b>")
    file.save(tmp_path / "routing.pt", [made], 1)
    page = tmp_path / "routing.html"
    assert run(tmp_path / "routing.pt", "--html", page).exit_code == 0
    text = page.read_text()
    parsed = _Page()
    parsed.feed(text)
    assert not parsed.tags
    assert not parsed.loaded
    assert "http" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert "&lt;b&gt;moe" in text
    assert "<b>" not in text
    assert parsed.count["svg"] == 4
    assert parsed.count["rect"] == 8 + 4 + 4 * 4  # experts, ranks, traffic
    assert "Skewed: rank 0" in text


def test_a_large_page_stays_small(tmp_path: Path) -> None:
    made = recorded("uniform", num_ranks=128, num_experts=512, num_tokens=2)
    file.save(tmp_path / "routing.pt", [made], 1)
    page = tmp_path / "routing.html"
    assert run(tmp_path / "routing.pt", "--html", page).exit_code == 0
    assert page.stat().st_size < 1_000_000


def test_a_picture(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.image import imread

    for words in ([], ["--layer", 0]):
        assert run(path, *words, "--png", tmp_path / "load.png").exit_code == 0
        image = imread(tmp_path / "load.png")
        assert image.shape[:2] == (1140, 1650)
        assert image.std() > 0.05


@pytest.mark.parametrize(
    "words, told",
    [
        (["none.pt"], r"none\.pt is missing"),
        (["text.pt"], r"text\.pt is not a recording of tokenyard\.record"),
        (["tensor.pt"], r"tensor\.pt is not a recording of tokenyard\.record"),
        (["newer.pt"], r"newer\.pt has version 2, want 1"),
        (["damaged.pt"], r"damaged\.pt is a recording that is damaged: topk_idx of moe is"),
        (["routing.pt", "--ranks", "3"], "ranks is 3, want a number that divides the 16 experts"),
        (["routing.pt", "--nodes", "3"], "nodes is 3, want a number that divides the 4 ranks"),
        (["routing.pt", "--layer", "nine"], "there is no layer 'nine', want one of these"),
        (["routing.pt", "--hidden", "0"], "hidden is 0, want at least 1"),
        (["routing.pt", "--html", "no/where.html"], r"no/where\.html"),
    ],
)
def test_mistakes_are_told_in_one_line(
    path: Path, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    Path("text.pt").write_text("hello")
    torch.save(torch.ones(3), "tensor.pt")
    plain = torch.load(path, weights_only=True)
    torch.save({**plain, "version": 2}, "newer.pt")
    plain["layers"][0]["topk_idx"] = plain["layers"][0]["topk_idx"][1:]
    torch.save(plain, "damaged.pt")
    said = run(*words)
    assert said.exit_code == 2
    assert re.search(told, said.stderr), said.stderr
    assert said.stderr.count("\n") == 1
    assert not said.stdout
