"""The pattern that the paper's rule gives each head, and why: ``python -m bench.fidelity.patterns --out FILE.jsonl``.

SmolLM2-135M reads the test texts densely; on every layer's query and key both selections choose their blocks. A line of JSON for
each selection and text, with figures by layer and head: density, the attention of the last rows that the kept blocks hold and,
of ``coverage``, the Jensen-Shannon distance of the pooled estimate and whether the head is query-aware. The same command goes on
where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.fidelity.attention import command_line, model_and_texts, rounded
from bench.fidelity.run import Log
from bench.fidelity.sparse_model import attending
from flexmask import flexprefill_mask

# named as in the lists of methods
SELECTIONS = {f"{name}:gamma=0.9": {"selection": name, "gamma": 0.9} for name in ("coverage", "hybrid")}
FIGURES = ("density", "coverage", "js_distance", "is_query_aware")


@torch.no_grad()
def measure(model: PreTrainedModel, ids: Tensor, options: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Figures of one selection by layer and head."""
    found: dict[str, list[Tensor]] = {name: [] for name in FIGURES}

    def look(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        made = flexprefill_mask(query, key, scale=scale, return_stats=True, **options)
        assert isinstance(made, tuple)
        for name, layers in found.items():
            layers.append(getattr(made[1], name)[0].float())

    with attending(None, look):
        model.base_model(input_ids=ids[None], use_cache=False)
    return {name: rounded(torch.stack(layers)) for name, layers in found.items() if not torch.stack(layers).isnan().any()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both selections on every text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = command_line(parser, arguments)
    stop = time.monotonic() + 60 * options.minutes
    log = Log(options.out)
    model, chosen = model_and_texts(options, "cuda" if torch.cuda.is_available() else "cpu")
    for text, ids in chosen.items():
        for name, selection in SELECTIONS.items():
            if log.has(name, text, len(ids)):
                continue
            if time.monotonic() > stop:
                print("out of time before", name, text, flush=True)
                return
            log.write(bed="patterns", method=name, text=text, tokens=len(ids), **measure(model, ids, selection))


if __name__ == "__main__":
    main()
