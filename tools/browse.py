"""Opens every page of the built site in Chromium, as wide as a desktop and a phone, light and dark.

    mkdocs build -d /tmp/site && python -m tools.browse /tmp/site /tmp/seen

It says which pages are wider than the window, which pictures did not load, and what the console
said, writes a screenshot of each page and setting, and sheets of many (`sheet-*.png`) to look at.
Needs chromium, `pip install websocket-client pillow`, and a few minutes: at night, and by hand
before a release.
"""

from __future__ import annotations

import argparse
import base64
import functools
import http.server
import importlib
import io
import json
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTHS = {"phone": 390, "desktop": 1280}
SCHEMES = {"light": "default", "dark": "slate"}  # what mkdocs.yml calls them
_SWITCH = "document.body.dataset.mdColorScheme"
_TALL = 1500  # pixels of a page that a screenshot shows at most
_ACROSS, _DOWN = 6, 2  # screenshots on a sheet

# What sticks out of the window though nothing around it scrolls, and pictures without pixels.
_FAULTS = """(() => {
  const wide = document.documentElement.clientWidth, faults = [];
  const over = document.documentElement.scrollWidth - wide;
  if (over > 0) faults.push(`the page is ${over} px wider than the window`);
  const scrolls = one => { for (; one; one = one.parentElement)
    if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(one).overflowX)) return true;
    return false; };
  for (const one of document.querySelectorAll("article *")) {
    const box = one.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !scrolls(one.parentElement) && !scrolls(one))
      faults.push(`<${one.tagName.toLowerCase()}> ends at ${Math.round(box.right)} px`);
  }
  for (const one of document.images)
    if (!one.naturalWidth) faults.push(`${one.src} shows nothing`);
  return JSON.stringify(faults.slice(0, 5));
})()"""


class Browser:
    """One tab of Chromium, driven by its DevTools protocol."""

    def __init__(self, port: int) -> None:
        websocket = importlib.import_module("websocket")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tabs = json.load(answer)
        (tab, *_) = [tab for tab in tabs if tab["type"] == "page"]
        self._socket = websocket.create_connection(
            tab["webSocketDebuggerUrl"], suppress_origin=True, timeout=60
        )
        self._number = 0
        self.said: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": given}))
        while True:
            message = self._read()
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def wait_for(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        if message.get("method") == "Runtime.exceptionThrown":
            self.said.append(message["params"]["exceptionDetails"]["text"])
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.said.append(f"{entry['text']} {entry.get('url', '')}")
        return message

    def open(self, url: str, width: int) -> list[str]:
        """Show a page, and return what is wrong with it."""
        self.said = []
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")
        time.sleep(0.15)  # the page's own script lays out, and asks for the index of the search
        found = self.call("Runtime.evaluate", expression=_FAULTS)["result"]["value"]
        return [*json.loads(found), *self.said]

    def screenshot(self, width: int, scheme: str) -> bytes:
        self.call("Runtime.evaluate", expression=f"{_SWITCH} = {SCHEMES[scheme]!r}")
        time.sleep(0.3)  # colours fade
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], _TALL), "scale": 1}
        taken = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            told = Path(profile, "DevToolsActivePort")
            deadline = time.monotonic() + 30
            while not told.exists() or not told.read_text():
                assert time.monotonic() < deadline, "chromium did not start"
                time.sleep(0.1)
            yield Browser(int(told.read_text().split()[0]))
        finally:
            process.terminate()
            process.wait()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def sheets(pictures: Sequence[Path], width: int, name: Path) -> None:
    """Put screenshots beside each other, many on a sheet."""
    image = importlib.import_module("PIL.Image")
    wide, high = 300, 560
    for begin in range(0, len(pictures), _ACROSS * _DOWN):
        sheet = image.new("RGB", (_ACROSS * (wide + 8), _DOWN * (high + 8)), "orange")
        for place, path in enumerate(pictures[begin : begin + _ACROSS * _DOWN]):
            shown = image.open(io.BytesIO(path.read_bytes()))
            shown = shown.resize((wide, round(shown.height * wide / width)))
            shown = shown.crop((0, 0, wide, min(high, shown.height)))
            down, across = divmod(place, _ACROSS)
            sheet.paste(shown, (across * (wide + 8), down * (high + 8)))
        sheet.save(f"{name}-{begin // (_ACROSS * _DOWN)}.png")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("site", type=Path, help="where mkdocs built it")
    parser.add_argument("seen", type=Path, help="where screenshots go")
    parser.add_argument("--only", default="", help="pages whose path has this in it")
    args = parser.parse_args(given)
    args.seen.mkdir(parents=True, exist_ok=True)
    pages = sorted(path.relative_to(args.site).as_posix() for path in args.site.rglob("*.html"))
    pages = [page for page in pages if args.only in page and not page.startswith("assets/")]
    faults = 0
    with served(args.site) as address, browser() as tab:
        for kind, width in WIDTHS.items():
            pictures: dict[str, list[Path]] = {scheme: [] for scheme in SCHEMES}
            for page in pages:
                for fault in tab.open(f"{address}/{page}", width):
                    faults += 1
                    print(f"{page} ({kind}): {fault}", flush=True)
                name = page.removesuffix("/index.html").removesuffix(".html").replace("/", ".")
                for scheme, seen in pictures.items():
                    if page.startswith("source/") and scheme != "light":
                        continue  # files of the repository, each like the others
                    seen.append(args.seen / f"{name}-{kind}-{scheme}.png")
                    seen[-1].write_bytes(tab.screenshot(width, scheme))
            for scheme, seen in pictures.items():
                sheets(seen, width, args.seen / f"sheet-{kind}-{scheme}")
    print(f"{len(pages)} pages, at {len(WIDTHS)} widths: {faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
