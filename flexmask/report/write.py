"""Writing the report of an inspection."""

from __future__ import annotations

import json
from pathlib import Path

from flexmask.integrations.inspection import Inspection
from flexmask.report.images import head_images, shown_head_images
from flexmask.report.page import page


def write_report(found: Inspection, folder: str | Path, *, model: str | None = None, prompt: str = "") -> Path:
    """Write ``report.html``, its pictures as PNG and ``inspection.json`` into a folder, which is made if need be.

    The page is one file: it loads nothing from elsewhere, not from the folder either, and has no script.

    Parameters
    ----------
    found
        Of `flexmask.integrations.inspection.inspect_prefill`.
    folder
        Where to write; files of these names are replaced.
    model
        The model's name. Default: that of its class.
    prompt
        The prompt's text, of which the page shows the beginning and the end. Default: none.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    """
    folder = Path(folder)
    overview = head_images(found)
    shown = [shown_head_images(head) for head in found.heads]
    folder.mkdir(parents=True, exist_ok=True)
    for image in [*overview, *(image for images in shown for image in images)]:
        (folder / f"{image.name}.png").write_bytes(image.png)
    (folder / "inspection.json").write_text(json.dumps(found.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(page(found, overview, shown, model or str(found.about["model"]), prompt), encoding="utf-8")
    return path
