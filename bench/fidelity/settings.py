"""Settings of each method by rising density, and the arguments that choose them."""

from __future__ import annotations

import argparse
import json
from typing import Any, NamedTuple

from bench import method_file
from flexmask import block_masks as block_masks  # fills the table of methods
from flexmask.json_settings import json_data
from flexmask.method import METHODS, Method, method_of

Options = dict[str, Any]


class Setting(NamedTuple):
    """A method with its options, possibly `block_size` and `layers` (by layer as text)."""

    method: str
    options: Options

    def __str__(self) -> str:
        return f"{self.method} {json.dumps(self.options, sort_keys=True)}{' (the default)' if self.is_default else ''}"

    @property
    def is_default(self) -> bool:
        """True for what a user gets who names the method only, whatever `options` spell out."""
        own = METHODS[self.method].checked(128, {}) if self.method in METHODS else None
        return own is not None and "layers" not in self.options and vars(self.layer_method()) == vars(own)

    def layer_method(self, layer: int = 0) -> Method:
        """The checked method with a layer's options."""
        options = {**self.options, **self.options.get("layers", {}).get(str(layer), {})}
        options.pop("layers", None)
        return method_of(self.method, options.pop("block_size", 128), options)


def by(option: str, *values: Any, **shared: Any) -> list[Options]:
    """Settings that differ in one option."""
    return [{option: value, **shared} for value in values]


# what `sparse_prefill(model)` runs; the other settings of hybrid have no floor, as the rows of the tables
DEFAULT: list[Options] = [{"gamma": 0.9, "min_coverage": 0.5}]

# for comparisons of lengths: densities overlap
FEW: dict[str, list[Options]] = {
    "hybrid": by("gamma", 0.85, 0.9, 0.95, min_coverage=0.0) + DEFAULT,
    "flexprefill": by("gamma", 0.8, 0.9, 0.95),
    "published": by("gamma", 0.9, 0.95, 0.98),
    "xattention": by("threshold", 0.7, 0.8, 0.9),
    "flash_prefill": by("alpha", 0.2, 0.1, 0.05),
    "streaming_llm": by("window_blocks", 16, 64, sink_blocks=1),
}
# whole curves
ALL: dict[str, list[Options]] = {
    "hybrid": by("gamma", 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, min_coverage=0.0) + DEFAULT,
    "flexprefill": by("gamma", 0.6, 0.7, 0.8, 0.9, 0.95, 0.98),
    "published": by("gamma", 0.8, 0.9, 0.95, 0.98, 0.99),
    "xattention": by("threshold", 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97),
    "flash_prefill": by("alpha", 0.5, 0.2, 0.1, 0.05, 0.02, 0.01),
    "sparge": by("topk", 0.1, 0.2, 0.3, 0.5, similarity_threshold=-0.1),
    "hip": by("topk_blocks", 4, 8, 16, 32),
    "infllm": by("topk_blocks", 8, 16, 32, 64),
    # the same for every head and model; `minference_plan` searches one for a model
    "minference": by("plan", [100, 800], [500, 3000], [1000, 6096]),
    "vertical_slash": by("vertical_size", 1024, slash_size=1024)
    + by("vertical_size", 2048, slash_size=2048)
    + by("vertical_size", 4096, slash_size=4096),
    "streaming_llm": by("window_blocks", 8, 16, 32, 64, sink_blocks=1),
    "lm_infinite": by("local_tokens", 2048, 4096, 8192),
    "tri_shape": by("window_blocks", 8, 16, 32, 64),
    # the stand-in plan, which says nothing about MoA
    "moa": [{"sink_blocks": 1}],
    "oracle": by("gamma", 0.8, 0.85, 0.9, 0.95),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        help=f"some of {','.join(ALL)}, and FILE.py for the methods that a file defines; none: {','.join(FEW)}",
    )
    parser.add_argument("--curves", action="store_true", help="all settings of each method instead of a few")
    parser.add_argument(
        "--options", type=json_data, help='those of one method instead, as JSON like \'{"gamma": 0.97, "block_size": 64}\''
    )


def methods_of(path: str) -> list[str]:
    """The names of the methods that a Python file defines with the decorator `flexmask.mask_function.method`."""
    try:
        module = method_file.load(path)
    except ValueError as error:
        raise SystemExit(f"--methods: {error}") from None
    found = [name for name, method in METHODS.items() if method.__module__ == module.__name__]
    if not found:
        raise SystemExit(f"{path} must define a method with flexmask.mask_function.method")
    return found


def chosen(arguments: argparse.Namespace) -> list[Setting]:
    """The checked settings that the arguments name."""
    table = ALL if arguments.curves else FEW
    named = arguments.methods or list(table)
    own = {name: methods_of(name) for name in named if name.endswith(".py")}
    methods = [method for name in named for method in own.get(name, [name])]
    if arguments.options is not None:
        if len(methods) != 1:
            raise SystemExit(f"--options need one method in --methods; got {','.join(methods)}")
        # rows say with which floor they were measured
        floor = {"min_coverage": METHODS["hybrid"].defaults["min_coverage"]} if methods == ["hybrid"] else {}
        found = [Setting(methods[0], {**floor, **arguments.options})]
    else:
        of_files = [method for found in own.values() for method in found]
        unknown = [method for method in methods if method not in (*ALL, *of_files)]
        if unknown:
            raise SystemExit(f"--methods must be some of {','.join(ALL)}; got {unknown[0]}")
        found = [Setting(method, options) for method in methods for options in table.get(method, ALL.get(method, [{}]))]
    for setting in found:
        setting.layer_method()
    return found
