"""Reads and checks the options of a server, and those of one request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flexmask.base.checks import check_int, check_real, check_word
from flexmask.dense_policy import DensePolicy
from flexmask.integrations.serving.layers import LayerShape
from flexmask.settings import PrefillSettings, default_settings, saved_settings

_FIELDS = ("kernel", "file", "min_rows", "count_density", "log_every")
MIN_ROWS = 1024  # of a chunk; with fewer the engine's kernel is faster than gather, mask and sparse attention (docs/design.md)
_PREFIX = "flexmask_"  # of a request's options
GAMMA, DENSE = "flexmask_gamma", "flexmask_dense"
# the parameter in which the front end passes on the options that it has read; a request that sends it is refused
_ENCODED = "flexmask_read"
_KEY = "flexmask "  # how our keys for cached prefixes begin


@dataclass(frozen=True, eq=False)
class ServingOptions:
    """Options of one engine."""

    settings: PrefillSettings
    kernel: str = ""  # the engine's name of its backend for everything that is not sparse; vLLM's CPU build ignores it
    min_rows: int | None = None  # chunks of fewer rows run dense; None: `MIN_ROWS`, or block_size with dense_below=0
    count_density: bool = True  # sum the density of sparse calls on the device, for the log
    log_every: float = 60.0  # least seconds between logs of the counters, in steps that prefill; a log waits for the device
    source: str = "defaults"  # of the settings, for the log
    num_layers: int | None = None  # of the model, if its config tells

    @property
    def policy(self) -> DensePolicy:
        """The policy that decides which chunks run dense."""
        policy = self.settings.call_options.policy
        measured = MIN_ROWS if policy.dense_below else 0
        return policy._replace(min_rows=max(policy.min_rows, measured if self.min_rows is None else self.min_rows))


def read_options(
    given: Any, name: str, source: str, kernels: tuple[str, ...], kernel: str, model_config: Any = None
) -> ServingOptions:
    """Read and check the options before the first request.

    `given`, called `name` in messages, is None or a dict: the settings, flat as from `PrefillSettings.to_dict`, or the path of a
    JSON file of them under ``"file"``; and fields of `ServingOptions`. Without settings, those in transformers' `model_config`
    apply. Raises TypeError or ValueError for unknown options, wrong values, and a file together with settings.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of options; got {type(given).__name__}")
    fields = {"kernel": kernel, **{field: given[field] for field in _FIELDS if field in given}}
    chosen = {option: value for option, value in given.items() if option not in _FIELDS}
    path = fields.pop("file", None)
    check_word("kernel", fields["kernel"], kernels)
    if not isinstance(fields.get("count_density", True), bool):
        raise TypeError(f"count_density must be true or false; got {fields['count_density']!r}")
    if "min_rows" in fields:
        check_int("min_rows", fields["min_rows"])
        if fields["min_rows"] < 0:
            raise ValueError(f"min_rows must be >= 0; got {fields['min_rows']}")
    if "log_every" in fields:
        check_real("log_every", fields["log_every"])
        if fields["log_every"] <= 0:
            raise ValueError(f"log_every must be > 0 seconds; got {fields['log_every']}")
    # a model of several parts keeps its language model's config inside
    text = getattr(model_config, "get_text_config", lambda: model_config)()
    if path is not None:
        if not isinstance(path, str):
            raise TypeError(f"file must be a path; got {type(path).__name__}")
        if chosen:
            raise ValueError(f"file cannot be combined with other settings; got {sorted(chosen)} too")
        settings, source = PrefillSettings.load(path), path
    elif chosen:
        settings = PrefillSettings.from_dict(chosen, name, _FIELDS)
    elif saved := saved_settings(model_config) or saved_settings(text):
        settings, source = saved, "the model's config.json"
    else:
        settings, source = default_settings(), "defaults"
    return ServingOptions(settings=settings, source=source, num_layers=getattr(text, "num_hidden_layers", None), **fields)


class RequestOptions(NamedTuple):
    """The options of one request; a request without options has None instead."""

    gamma: float | None = None  # of every head of the sparse layers; None: the server's
    dense: bool = False

    def encoded_in(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        """A request's parameters, and among them these options as `decoded_options` reads them."""
        return {**(params or {}), _ENCODED: list(self)}


def decoded_options(params: Mapping[str, Any] | None) -> RequestOptions | None:
    """The options that the front end stored among a request's parameters; None if they are absent or malformed."""
    # a client that bypasses our front end must not crash the engine
    match params.get(_ENCODED) if isinstance(params, Mapping) else None:
        case [gamma, bool(dense)] if gamma is None or (type(gamma) is float and 0 < gamma <= 1):
            return RequestOptions(gamma, dense)
    return None


def prefix_key(client_key: str | None, requested: RequestOptions | None) -> str | None:
    """A request's key for cached prefixes, unique to its options and the client's key, which is any text or none."""
    if requested is None:
        # the client's key, unless it could be mistaken for one of ours
        return f"{_KEY}none: {client_key}" if str(client_key).startswith(_KEY) else client_key
    options = "dense" if requested.dense else f"gamma {requested.gamma!r}"
    return f"{_KEY}{options}: {client_key or ''}"


def request_options(params: Any, holder: Any, read: Callable[[], ServingOptions], ranks: int = 1) -> RequestOptions | None:
    """The options among a request's parameters, or None if it sets none; ValueError, whose text the client gets, for wrong ones.

    The first gamma calls `read` for the server's options, which then stay on `holder`, an object of the engine's front end. A
    gamma is refused if they keep a layer stock on one of the tensor-parallel `ranks`.
    """
    params = params if isinstance(params, Mapping) else {}
    unknown = sorted(name for name in map(str, params) if name.startswith(_PREFIX) and name not in (GAMMA, DENSE))
    if unknown:
        raise ValueError(f"a request takes {GAMMA} and {DENSE}; got {unknown[0]!r}")
    gamma, dense = params.get(GAMMA), params.get(DENSE)  # null means left out
    if dense not in (None, False, True):  # some engines pass 0 and 1 for JSON's booleans
        raise ValueError(f"{DENSE} must be true or false; got {dense!r}")
    if gamma is None:
        return RequestOptions(dense=True) if dense else None
    if dense:
        raise ValueError(f"{GAMMA} cannot be combined with {DENSE}, which no gamma changes; got {gamma!r}")
    if not hasattr(holder, "flexmask_options"):
        holder.flexmask_options = read()
    options: ServingOptions = holder.flexmask_options
    method = options.settings.layer_method()
    if "gamma" not in method.per_head_options:
        raise ValueError(f"{GAMMA} needs a method with gamma; this server runs {method.name!r}")
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
        raise ValueError(f"{GAMMA} must be a number; got {type(gamma).__name__}")
    try:
        method.checked(method.block_size, {**method.options, "gamma": gamma})
    except ValueError as error:
        raise ValueError(f"{_PREFIX}{error}") from None
    layer = _stock_layer(options, ranks)
    if layer is not None:
        why = "every head keeps every block"
        raise ValueError(f"{GAMMA} must be left out: by this server's settings layer {layer} runs stock ({why})")
    return RequestOptions(gamma=float(gamma))


@functools.lru_cache(maxsize=16)
def _stock_layer(options: ServingOptions, ranks: int) -> int | None:
    """The first layer found that runs stock on some rank because every head keeps every block; None without one."""
    settings, policy = options.settings, options.policy
    special = {*settings.layers, *settings.dense_layers}
    # represents all layers without options of their own
    ordinary = next(layer for layer in range(len(special) + 1) if layer not in special)
    layers = [ordinary] if options.num_layers is None or ordinary < options.num_layers else []
    for layer in (*layers, *sorted({*settings.layers}.difference(settings.dense_layers))):
        method = settings.layer_method(layer)
        heads = method.num_heads or ranks
        shape = LayerShape(num_heads=heads, num_kv_heads=1, head_dim=64, v_head_dim=64, scale=1.0)
        kept = shape.keeps_every_block_by_head(method)
        kept_by_rank = (kept[start : start + heads // ranks] for start in range(0, heads, heads // ranks))
        if any(map(policy.selection_reason, kept_by_rank)):
            return layer
    return None
