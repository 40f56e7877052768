"""The releases of SGLang that were run with the plug-in, and the check of another one's interfaces at start-up."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from flexmask.integrations.sglang.prefill import ONE, REFUSED

Release = tuple[int, int, int]
RUN: dict[Release, str] = {
    (0, 5, 16): "CPUs",
}
"""By release: where tests/sglang ran on it"""
_OF_A_STEP = {
    "forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "seq_lens_sum", "out_cache_loc", "positions",
    "spec_info", "encoder_lens", "multi_item_delimiter_indices", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens",
    "extend_start_loc", "extend_seq_lens_cpu", "extend_prefix_lens_cpu",
}  # fmt: skip
# options of the server under which it is refused, and those that the plug-in reads
_OF_A_SERVER = {*REFUSED, *ONE, "chunked_prefill_size", "enable_metrics"}
# what a batch has where slots are no longer what the pool is read and written by
_NOT_OF_A_STEP = {"kv_loc_plan"}
# arguments of a layer that say whether it is served; another one may change attention
_OF_A_LAYER = {
    "num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "logit_cap", "v_head_dim", "sliding_window_size",
    "is_cross_attention", "pos_encoding_mode", "logit_capping_method", "quant_config", "attn_type", "use_irope", "prefix",
}  # fmt: skip
_FUNCTIONS = {
    "backend.init_forward_metadata": ("forward_batch",),
    "backend.forward_extend": ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    "pool.set_kv_buffer": ("layer", None, "cache_k", "cache_v"),
    "pool.get_key_buffer": ("layer_id",),
    "pool.get_value_buffer": ("layer_id",),
}


def release_of(version: str) -> Release:
    """The first three numbers of a version."""
    numbers = [*(int(number) for number in re.findall(r"\d+", version)[:3]), 0, 0, 0]
    return (numbers[0], numbers[1], numbers[2])


def check_release(version: str, faults: list[str]) -> str | None:
    """Refuse an SGLang whose interfaces are not those that the plug-in stands on, and one older than what was run.

    Parameters
    ----------
    version
        The installed one.
    faults
        Those of its interfaces (`interface_faults`).

    Returns
    -------
    str
        A warning for a newer release than those that were run; None for these.

    Raises
    ------
    ImportError
        With the release that is installed, those that were run, and what does not fit.
    """
    release, known = release_of(version), ", ".join(".".join(map(str, each)) for each in sorted(RUN))
    if release not in RUN and release < max(RUN):
        raise ImportError(f"flexmask was run with SGLang {known}; got {version}, which it was not run with")
    if faults:
        raise ImportError(
            f"flexmask was run with SGLang {known}; got {version}, whose interfaces are others: {'; '.join(faults)}"
        )
    if release in RUN:
        return None
    return (
        f"flexmask was run with SGLang {known}; got {version}, which it was not run with. Its interfaces fit: it is served. "
        "Compare answers at gamma 1 with a server without flexmask"
    )


def interface_faults(stock: Any) -> list[str]:
    """Differences of the installed SGLang from the interfaces that the plug-in needs, for one of its backends; [] if none."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.server_args import ServerArgs

    faults = []
    for name, wanted in _FUNCTIONS.items():
        owner, _, attribute = name.partition(".")
        function = getattr(stock if owner == "backend" else MHATokenToKVPool, attribute, None)
        found = [] if function is None else [each for each in inspect.signature(function).parameters if each != "self"]
        if any(each is not None and each != got for each, got in zip(wanted, [*found, *[""] * len(wanted)], strict=False)):
            faults.append(f"{name} must take {', '.join(each or '...' for each in wanted)}; got {', '.join(found) or 'none'}")
    fields = {each.name for each in dataclasses.fields(ForwardBatch)}
    modes, of_the_server = set(ForwardMode.__members__), {each.name for each in dataclasses.fields(ServerArgs)}
    for what, wanted_names, names in (
        ("ForwardBatch", _OF_A_STEP, fields),
        ("ForwardMode", {"EXTEND", "MIXED"}, modes),
        ("ServerArgs", _OF_A_SERVER, of_the_server),
    ):
        absent = sorted(wanted_names - names)
        if absent:
            faults.append(f"{what} must have {', '.join(absent)}")
    if _NOT_OF_A_STEP & fields:
        faults.append(f"ForwardBatch must not have {', '.join(sorted(_NOT_OF_A_STEP & fields))}")
    arguments = set(inspect.signature(RadixAttention).parameters)
    if arguments != _OF_A_LAYER:
        faults.append(f"RadixAttention must take {', '.join(sorted(_OF_A_LAYER))}; got {', '.join(sorted(arguments))}")
    return faults
