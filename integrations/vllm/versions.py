"""The releases of vLLM that were run with the plug-in, and the check of another one's interfaces at start-up."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

Release = tuple[int, int]
RUN: dict[Release, str] = {
    (0, 26): "one and two H200s, and CPUs",
    (0, 29): "CPUs",
    (0, 32): "CPUs",
}
"""By release: where tests/vllm ran on it"""
# of the stock classes, in their order: what the plug-in overrides and calls
_FUNCTIONS = {
    "builder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
    "builder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    "builder.build_for_cudagraph_capture": ("common_attn_metadata",),
    "builder.get_cudagraph_support": ("vllm_config", "kv_cache_spec"),
    "split_attn_metadata": ("ubatch_slices", "common_attn_metadata"),
    "UBatchSlice": ("request_slice", "token_slice"),
}
_OF_PLAIN_ATTENTION = {
    "impl.forward": (
        "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale",
    ),
    "impl.do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
}  # fmt: skip
_OF_LATENT_ATTENTION = {
    "impl.forward_mha": (
        "q", "kv_c_normed", "k_pe", "kv_c_and_k_pe_cache", "attn_metadata", "k_scale", "output", "output_scale",
    ),
}  # fmt: skip
# arguments of an implementation that say which layers are served
_ARGUMENTS = {"num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"}
_ARGUMENTS |= {"logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"}
_LATENT_ARGUMENTS = {"kv_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj"}
# of a step
_FIELDS = {"query_start_loc_cpu", "seq_lens_cpu_upper_bound", "num_reqs", "block_table_tensor", "causal", "is_prefilling"}
_FIELDS |= {"mm_req_doc_ranges"}
# of a step with latent attention, whose decoding rows come first
_LATENT_FIELDS = {"num_decodes", "num_decode_tokens"}
_MODEL = {"use_mla", "get_total_num_hidden_layers", "hf_text_config"}


def release_of(version: str) -> Release:
    """Major and minor number of a version."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0)


def check_release(version: str, faults: list[str]) -> str | None:
    """Refuse a vLLM whose interfaces are not those that the plug-in stands on, and one that is older than what was run.

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
    release, known = release_of(version), ", ".join(f"{major}.{minor}" for major, minor in sorted(RUN))
    if release not in RUN and release < max(RUN):
        raise ImportError(f"flexmask was run with vLLM {known}; got {version}, which it was not run with")
    if faults:
        raise ImportError(f"flexmask was run with vLLM {known}; got {version}, whose interfaces are others: {'; '.join(faults)}")
    if release in RUN:
        return None
    return (
        f"flexmask was run with vLLM {known}; got {version}, which it was not run with. Its interfaces fit: it is served. "
        "Compare answers at gamma 1 with a server without flexmask"
    )


def _arguments(impl: type) -> set[str]:
    """Those of the class and of the classes that it passes the rest of its keywords to."""
    made = [vars(each)["__init__"] for each in impl.__mro__ if "__init__" in vars(each) and each is not object]
    passes = [any(each.kind is each.VAR_KEYWORD for each in inspect.signature(init).parameters.values()) for init in made]
    number = passes.index(False) + 1 if False in passes else len(made)
    return {name for init in made[:number] for name in inspect.signature(init).parameters}


def _latent_fields() -> set[str]:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

    return {each.name for each in dataclasses.fields(MLACommonMetadata)}


def interface_faults(stock: Any) -> list[str]:
    """Differences of the installed vLLM from the interfaces that the plug-in needs, for one of its stock backends; [] if none."""
    from vllm import config
    from vllm.compilation import backends
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.worker import ubatch_utils

    builder, impl = stock.get_builder_cls(), stock.get_impl_cls()
    faults = []
    is_latent = stock.is_mla()
    arguments = _ARGUMENTS | (_LATENT_ARGUMENTS if is_latent else {"sinks"})
    for name, wanted in {**_FUNCTIONS, **(_OF_LATENT_ATTENTION if is_latent else _OF_PLAIN_ATTENTION)}.items():
        owner, _, attribute = name.rpartition(".")
        holder: Any = {"builder": builder, "impl": impl}.get(owner, ubatch_utils)
        function = getattr(holder, attribute, None)
        found = [] if function is None else [each for each in inspect.signature(function).parameters if each != "self"]
        if tuple(found[: len(wanted)]) != wanted:
            faults.append(f"{name} must take {', '.join(wanted)}; got {', '.join(found) or 'none'}")
    for what, wanted_names, names in (
        (
            "the implementation's arguments",
            arguments,
            _arguments(impl),
        ),
        ("CommonAttentionMetadata", _FIELDS, {each.name for each in dataclasses.fields(CommonAttentionMetadata)}),
        ("AttentionCGSupport", {"UNIFORM_BATCH"}, set(AttentionCGSupport.__members__)),
        ("vllm.compilation.backends", {"model_tag"}, set(vars(backends))),
        ("vllm.config", {"get_current_vllm_config", "get_current_vllm_config_or_none"}, set(vars(config))),
        ("CompilationConfig", {"static_forward_context"}, {each.name for each in dataclasses.fields(config.CompilationConfig)}),
        ("ModelConfig", _MODEL, {*dir(config.ModelConfig), *(each.name for each in dataclasses.fields(config.ModelConfig))}),
        ("metadata of latent attention", _LATENT_FIELDS if is_latent else set(), _latent_fields() if is_latent else set()),
    ):
        absent = sorted(wanted_names - names)
        if absent:
            faults.append(f"{what} must have {', '.join(absent)}")
    if not is_latent and stock.forward_includes_kv_cache_update:
        faults.append("keys and values must be in the cache before forward runs")
    return faults
