"""Writing the report of an inspection."""

from __future__ import annotations

import json
from pathlib import Path

from flexmask.integrations.inspect import Inspection
from flexmask.report.images import head_images, shown_head_images
from flexmask.report.page import page


def write_report(found: Inspection, folder: str | Path, *, model: str | None = None, prompt: str = "") -> Path:
    """Write ``report.html``, its pictures as PNG and ``inspection.json`` into a folder, which is created if need be.

    The page is one file that loads nothing. Nothing is written before all is drawn. Needs matplotlib.

    Parameters
    ----------
    found
        From `flexmask.integrations.huggingface.inspect_prefill`.
    folder
        Where to write; files of these names are replaced.
    model
        The model's name. Default: its class's.
    prompt
        The prompt's text; the page shows its beginning and end.

    Returns
    -------
    Path
        The page.
    """
    folder = Path(folder)
    overview = head_images(found)
    shown = [shown_head_images(head) for head in found.heads]
    files = {f"{image.name}.png": image.png for image in [*overview, *(image for images in shown for image in images)]}
    text = page(found, overview, shown, model or str(found.about["model"]), prompt)
    # a tokenizer may decode half of a surrogate pair
    files["report.html"] = text.encode("utf-8", errors="backslashreplace")
    files["inspection.json"] = json.dumps(found.to_dict(), indent=1, allow_nan=False).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / "report.html"
