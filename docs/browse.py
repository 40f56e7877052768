"""Open every page of the built site in a headless Chromium: ``python docs/browse.py``, or ``make docs-browse``.

Fails on console output, missing pictures, resources from elsewhere and long tables that do not sort. ``--screenshots FOLDER``
also draws each page, wide and narrow.
"""

from __future__ import annotations

import argparse
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
WIDTHS = {"wide": "1400,1100", "narrow": "420,900"}
SECONDS = 90


class _Files(SimpleHTTPRequestHandler):
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
    html, console = open_page(browser, f"{site}/{page.relative_to(SITE)}", "--dump-dom")
    found = [line.partition("CONSOLE")[2] for line in console]
    if "md-content" not in html:
        found.append("the page is empty")
    # docs/tables.js marks tables of more than ten rows
    tables = re.findall(r"<table([^>]*)>(.*?)</table>", html, re.DOTALL)
    found += ["a long table does not sort" for head, rows in tables if rows.count("<tr") > 11 and "data-sorts" not in head]
    for name, source in re.findall(r"<(img|script|link)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"", html):
        if re.match(r"https?:|//", source) and not source.startswith(site):
            found.append(f"{name} from elsewhere: {source}")
        elif (
            not source.startswith(("data:", "#", "blob:", site))
            and not (page.parent / source.partition("?")[0].partition("#")[0]).exists()
        ):
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
                for width, size in WIDTHS.items():
                    picture = options.screenshots.resolve() / f"{'-'.join(name.with_suffix('').parts)}-{width}.png"
                    open_page(browser, f"{site}/{name}", f"--window-size={size}", f"--screenshot={picture}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
