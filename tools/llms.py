"""docs/llms.txt: what the site has, for programs that read it (https://llmstxt.org).

`python -m tools.llms` prints it, `python -m tools.llms --write` writes the file, which the site
serves at its root, and tests/repo/test_llms.py fails while the file is another. Sections and titles
are those of mkdocs.yml's nav; what is said about a page is its first sentence.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILE = DOCS / "llms.txt"
_MOST = 200  # characters of what is said about a page

_ABOUT = """\
# tokenyard

> Expert parallelism for Mixture-of-Experts models, anywhere PyTorch runs: DeepEP's dispatch and
> combine in Python, exact to the bit, on CPUs and without special hardware.

- Install in a clone by `pip install .`. It wants Python 3.10, torch 2.10 and numba; no compiler.
- The object that users hold is `tokenyard.Buffer(group)`. `dispatch` sends each token once to each
  rank that owns one of its experts; `combine` brings the rows back and sums them.
- All ranks make the same calls in the same order. Rows arrive ordered by (source rank, token).
- `tokenyard.testing.run_virtual(job, 8)` calls `job(group)` on 8 ranks that are threads: no GPU, no
  launcher, no network.
- `import tokenyard as deep_ep` runs programs written for DeepEP.
- No GPU has run the Triton kernels yet.
"""


class Entry(NamedTuple):
    section: str  # the tab of the site
    title: str
    path: str  # below docs/


def entries() -> Iterator[Entry]:
    """The pages of the nav, in its order."""
    _, _, nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    section = ""
    for line in nav.splitlines():
        if found := re.match(r"  - (\w[^:]*):$", line):
            section = found.group(1)
        elif found := re.match(r" +- (?:(.+): )?([\w/]+\.md)$", line):
            title, path = found.groups()
            yield Entry(section, title or _title(path), path)


def text() -> str:
    lines, section = [_ABOUT.rstrip()], ""
    for entry in entries():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", ""]
        lines.append(f"- [{entry.title}]({address(entry.path)}): {said(entry.path)}")
    return "\n".join(lines) + "\n"


def address(path: str) -> str:
    """Where the site has a page, from its root."""
    folder = path.removesuffix(".md").removesuffix("index").rstrip("/")
    return f"{folder}/" if folder else "./"


def said(path: str) -> str:
    """The first sentence of a page's first paragraph, without marks of Markdown."""
    text = (DOCS / path).read_text()
    for block in re.split(r"\n\s*\n", text.partition("\n")[2].strip()):
        if re.match(r"[A-Za-z`*\[]", block):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            sentence = re.split(r"(?<=\.)\s+(?=[A-Z`*(a-z])", plain)[0].rstrip(":")
            if len(sentence) > _MOST:
                sentence = sentence[:_MOST].rsplit(" ", 1)[0] + " ..."
            return sentence
    return _title(path)


def _title(path: str) -> str:
    return (DOCS / path).read_text().partition("\n")[0].removeprefix("# ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/llms.txt")
    if parser.parse_args().write:
        FILE.write_text(text())
    else:
        print(text(), end="")


if __name__ == "__main__":
    main()
