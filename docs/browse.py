"""Open every page of the built site in a headless Chromium, wide and narrow: ``python docs/browse.py``, or ``make docs-browse``.

Fails on console output, broken pictures, resources from elsewhere, long tables that do not sort and pages wider than their
window. ``--screenshots FOLDER`` also draws each page.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent.parent / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    # whatever the site does not have fails, and says so on the console
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
WIDTHS = {"wide": 1400, "narrow": 390}  # pixels; Chromium's own windows have at least 500
SECONDS = 90
# opens the page behind its question mark in a frame of each width, and lists what is wrong there
_FRAMES = """<!doctype html><title>frames</title><body><pre></pre><script>
const faults = ([name, width], page) => {
  const found = [], root = page.documentElement;
  if (!page.querySelector(".md-content")) found.push("the page is empty");
  for (const image of page.images) if (!image.naturalWidth) found.push(`broken picture ${image.getAttribute("src")}`);
  for (const table of page.querySelectorAll("table"))  // docs/tables.js marks tables of more than ten rows
    if (table.rows.length > 11 && !("sorts" in table.dataset)) found.push("a long table does not sort");
  if (root.scrollWidth > root.clientWidth) found.push(`${root.scrollWidth} pixels wide`);
  return found.map(fault => `${name}, ${width} pixels: ${fault}`);
};
Promise.all(Object.entries(WIDTHS).map(width => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width[1]}px; height: 1000px; border: 0`;
  frame.onload = () => setTimeout(() => done(faults(width, frame.contentDocument)), 1000);
  frame.src = location.search.slice(1);
  document.body.append(frame);
}))).then(found => document.querySelector("pre").textContent = JSON.stringify(found.flat()));
</script>""".replace("WIDTHS", json.dumps(WIDTHS))


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if not self.path.startswith("/frames?"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(_FRAMES.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of a folder on a port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def open_page(browser: str, address: str, *flags: str) -> tuple[str, list[str]]:
    """The page's final HTML, and its lines on the console."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=4000", *flags, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def problems(browser: str, page: Path, site: str) -> list[str]:
    """Faults of one page."""
    shown, console = open_page(browser, f"{site}/frames?{page.relative_to(SITE).as_posix()}", "--dump-dom")
    found = [line.partition("CONSOLE")[2] for line in console]
    listed = re.search(r"<pre>(\[.*?\])</pre>", shown, re.DOTALL)
    found += json.loads(html.unescape(listed[1])) if listed else ["the page did not load"]
    for name, source in re.findall(r"<(img|script|link)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        if re.match(r"https?:|//", source):
            found.append(f"{name} from elsewhere: {source}")
        elif not source.startswith(("data:", "#")) and not (page.parent / re.split("[?#]", source)[0]).exists():
            found.append(f"{name} is missing: {source}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages of site/, default all")
    parser.add_argument("--screenshots", type=Path, help="folder to draw the pages into")
    options = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser found; looked for {', '.join(BROWSERS)}")
    # 404.html stands for any address, so its links start at the server's root
    pages = [page.resolve() for page in options.pages] or sorted(set(SITE.rglob("*.html")) - {SITE / "404.html"})
    if not pages:
        sys.exit("there is no site; run make docs")
    wrong = 0
    with served(SITE) as site:
        for page in pages:
            name = page.relative_to(SITE)
            found = problems(browser, page, site)
            wrong += len(found)
            print(f"{name}: {'; '.join(found) or 'ok'}", flush=True)
            if options.screenshots is not None:
                options.screenshots.mkdir(parents=True, exist_ok=True)
                for width, pixels in WIDTHS.items():
                    picture = options.screenshots.resolve() / f"{'-'.join(name.with_suffix('').parts)}-{width}.png"
                    open_page(browser, f"{site}/{name}", f"--window-size={pixels},1000", f"--screenshot={picture}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
