"""Put the Python files of a wheel of vLLM in the place of the installed CPU build's: ``python_files_of.py WHEEL RELEASE``."""

import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile


def main(wheel: str, release: str) -> None:
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    installed = Path(found.submodule_search_locations[0])
    for path in installed.rglob("*.py"):
        path.unlink()
    with ZipFile(wheel) as archive:
        named = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        archive.extractall(installed.parent, named)
    # vLLM takes its platform from the name of its release
    described = installed.parent / f"vllm-{release}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
