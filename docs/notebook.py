"""Run notebooks without Jupyter and keep their output (``make notebooks``), or turn them into pages of the site.

Pictures are the pyplot figures that a cell leaves open.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    """Read a notebook of format 4."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def code_cells(notebook: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Place and source of each cell of code."""
    for at, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            yield at, "".join(cell["source"])


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def pictures(cell: dict[str, Any]) -> list[bytes]:
    """Pictures of a cell, as PNG."""
    return [base64.b64decode(output["data"]["image/png"]) for output in cell["outputs"] if "image/png" in output.get("data", {})]


def run(notebook: dict[str, Any], name: str = "notebook") -> dict[str, Any]:
    """Run all cells in one namespace, which is returned; replaces their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (at, source) in enumerate(code_cells(notebook), start=1):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            exec(compile(source, f"{name}, cell {at + 1}", "exec"), names)
        outputs: list[dict[str, Any]] = []
        if text.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": text.getvalue().splitlines(keepends=True)})
        for picture in _drawn():
            data = {"image/png": base64.b64encode(picture).decode()}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        notebook["cells"][at] |= {"execution_count": number, "outputs": outputs}
    return names


def _drawn() -> list[bytes]:
    """Close the open figures; return them as PNG."""
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        out = io.BytesIO()
        # no version in the file: the same picture has the same bytes
        plt.figure(number).savefig(out, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        found.append(out.getvalue())
    plt.close("all")
    return found


def page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, found = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if text := printed(cell).rstrip("\n"):
            parts.append(f"```text\n{text}\n```")
        for picture in pictures(cell):
            file = f"{name}-{len(found) + 1}.png"
            found[file] = picture
            parts.append(f"![Drawn by the code above]({file})")
    return "\n\n".join(parts) + "\n", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    for path in parser.parse_args().notebooks:
        notebook = load(path)
        run(notebook, path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
