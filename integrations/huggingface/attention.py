"""The attention function of transformers: a method's blocks for a prefill, dense attention for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from flexmask._torch import is_exporting
from flexmask.attend import attend
from flexmask.base.checks import HEAD_DIMS, check_word
from flexmask.base.inputs import AttentionInputs, attention_inputs
from flexmask.dense_policy import DensePolicy
from flexmask.flex.dense import dense_attention
from flexmask.flex.joined import joined_mask
from flexmask.flex.visible import attention_to_visible
from flexmask.integrations.huggingface.compat import MODELS_MAKE_4D_MASKS, check_release
from flexmask.integrations.huggingface.mask import PrefillMask, prefill_mask
from flexmask.integrations.huggingface.packed import Segments, attention_packed, in_one_row, in_rows
from flexmask.integrations.huggingface.settings import PrefillSettings, saved_settings
from flexmask.integrations.record.run import PrefillRun
from flexmask.integrations.record.summary import CallSize
from flexmask.precision import without_autocast
from flexmask.selector import METHODS, Selector
from flexmask.stats import STATISTICS

if TYPE_CHECKING:
    from flexmask.integrations.huggingface.session import Session

NAME = "flexmask"
SESSION = "_flexmask_session"  # attribute of a model's modules: what the model has open
_ALWAYS_DENSE = DensePolicy(dense_below=2**63)
_SDPA, _EAGER = 'attn_implementation="sdpa"', 'attn_implementation="eager"'
_UNPACK = "use_cache=False and no attention_mask, with which packed sequences are served, or one prompt a batch row"
# Arguments that change attention, and what to use instead. The rest of what a model's forward is called with comes along too
# (labels, lengths, flags, a tokenizer), and passes.
_REFUSED = {
    "position_bias": _EAGER,
    "attention_bias": _EAGER,
    "alibi": _EAGER,
    "head_mask": _EAGER,
    "output_attentions": _EAGER,
    "block_indices": _SDPA,
    "indices": _SDPA,
    "sinks": _EAGER,
    "block_table": _SDPA,
    # of continuous batching, whose keys lie in a paged cache
    "read_index": _SDPA,
    "write_index": _SDPA,
    "prefill_chunk_size": "model.generate, which cuts the prompt",
}


def register(
    settings: PrefillSettings | str | Path | None = None,
    method: str | Callable[..., BlockMask] | None = None,
    *,
    name: str = NAME,
    **options: Any,
) -> None:
    """Make ``"flexmask"`` a name that ``set_attn_implementation`` and ``from_pretrained(attn_implementation=...)`` know.

    A model that is set to the name outside of `sparse_prefill` runs with what `configure` wrote into its config, else with the
    defaults.

    Parameters
    ----------
    settings, method, options
        As in `sparse_prefill`. With any, every model of this process runs with these, whatever its config holds, until the next
        call with other ones; only a `sparse_prefill` block with options of its own has those. Default: no such settings.
    name
        ``"flex_attention"`` puts the same attention behind that name too, for every model of the process: for programs that let
        through only names that they know. Default ``"flexmask"``.

    Raises
    ------
    ImportError
        With a transformers older than 4.54 or newer than 5.23.
    OSError, TypeError, ValueError
        For unknown options, values out of range, a file that is none of settings.

    Examples
    --------
    >>> register()
    """
    check_release()
    check_word("name", name, (NAME, "flex_attention"))
    found = process_settings()
    if settings is not None or method is not None or options:
        found = PrefillSettings.from_options(settings, method, **options)
    for each in {NAME, name}:
        known = AttentionInterface().get(each)
        if isinstance(known, functools.partial) and known.func is attention and known.keywords["process"] is found:
            continue  # compiled forwards would be compiled again
        AttentionInterface.register(each, functools.partial(attention, process=found))
        AttentionMaskInterface.register(each, prefill_mask)


def process_settings() -> PrefillSettings | None:
    """The settings that `register` gave to every model of the process, or None."""
    return getattr(AttentionInterface().get(NAME), "keywords", {}).get("process")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention call of transformers: heads first in, (batch, q_len, num_heads, head_dim) out."""
    if dropout != 0:
        raise refusal(f"dropout {dropout}", "model.eval()")
    for name, instead in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise refusal(f"the argument {name}", instead)
    if kwargs.get("output_attentions") is None and getattr(getattr(module, "config", None), "output_attentions", False):
        raise refusal("a config with output_attentions", _EAGER)
    mask, segments, visible = None, None, None
    if query.shape[2] == 1 and not isinstance(attention_mask, BlockMask):
        visible = None if attention_mask is None else _row_of_keys(attention_mask, key.shape[2])
    else:
        mask = _visibility(module, is_causal, attention_mask, query, key)
        segments = _segments(mask, query, kwargs)
    inputs = _inputs(query, key, value, mask, {"scale": scaling, "softcap": softcap, "sinks": s_aux})
    with without_autocast(query.device):
        if mask is None:
            # one row sees every key that is not masked, causal or not
            if visible is None:
                out = dense_attention(inputs)[0]
            else:
                out = attention_to_visible(inputs, query, visible, ~visible.any(-2).any(1))[0]
            return out.transpose(1, 2).contiguous(), None
        return serve(module, inputs, mask.tokens, mask.prefill, segments), None


def serve(
    module: nn.Module, inputs: AttentionInputs, tokens: int, number: int | None = None, segments: Segments | None = None
) -> Tensor:
    """Attention of one prefill call, or of its packed sequences to themselves. Autocast must be off.

    Parameters
    ----------
    module
        The attention module.
    tokens, number
        `PrefillMask.tokens` and `PrefillMask.prefill`.

    Returns
    -------
    Tensor
        (batch, q_len, num_heads, v_head_dim).
    """
    if torch.compiler.is_compiling():
        if is_exporting():
            raise NotImplementedError("flexmask does not serve torch.export; use torch.compile")
        if inputs.needs_grad:
            return _outside_the_graph(module, inputs, tokens)
        return prefill_operator(*inputs[: len(inputs) - 1], tokens, _number(module))
    if segments is not None:
        out = in_rows(
            attention_packed(PrefillCall.of(module, in_one_row(inputs), tokens, number), segments), inputs.query.shape[0]
        )
    else:
        call: PrefillCall = PrefillCall.of(module, inputs, tokens, number)
        out = call.attention()
    return out.transpose(1, 2).contiguous()


_outside_the_graph = torch.compiler.disable(serve)
# attention modules of compiled forwards: an operator takes tensors, numbers and words only
_MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def _noted(module: nn.Module) -> int:
    _MODULES[id(module)] = module
    return id(module)


# torch.compile guards that it is this module
_number: Callable[[nn.Module], int] = torch.compiler.assume_constant_result(_noted)
# a captured graph would run without the Python that makes masks and keeps statistics
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op(
    "flexmask::prefill",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, float? softcap, SymInt? window, Tensor? attention_mask, "
    "Tensor? offset, Tensor? sinks, SymInt tokens, int module) -> Tensor",
    **_TAGS,
)
def prefill_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    attention_mask: Tensor | None,
    offset: Tensor | None,
    sinks: Tensor | None,
    tokens: int,
    module: int,
) -> Tensor:
    """`serve` as an operator that a compiled forward does not look into: what is open on the model changes between calls."""
    inputs = AttentionInputs(query, key, value, scale, softcap, window, attention_mask, offset, sinks)
    return serve(_MODULES[module], inputs, tokens)


@prefill_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    batch, num_heads, q_len, _ = query.shape
    return query.new_empty((batch, q_len, num_heads, value.shape[3]))


class PrefillCall(NamedTuple):
    """One attention call of a prefill, and whose it is."""

    inputs: AttentionInputs
    tokens: int  # so far, this call's included, as far as the host knows (`PrefillMask.tokens`)
    prefill: int | None  # number of the mask
    layer: int
    settings: PrefillSettings
    selector: Selector  # of this layer, its numbers by head those of the heads that are here
    run: PrefillRun | None = None  # where it is recorded
    probe: Callable[[PrefillCall], Tensor] | None = None  # serves it
    sequence: int = 0  # of a pack

    @classmethod
    def of(cls, module: nn.Module, inputs: AttentionInputs, tokens: int, prefill: int | None) -> PrefillCall:
        """The call of an attention module, with the settings of the block that it is in, else of the process or its config."""
        session: Session | None = module.__dict__.get(SESSION)
        block, num_heads = None if session is None else session.block(), inputs.query.shape[1]
        if block is not None:
            layer = block.session.layer_of(module)
            selector = block.selector(module, layer, num_heads)
            return cls(inputs, tokens, prefill, layer, block.run.settings, selector, block.run, block.probe)
        settings = process_settings() or saved_settings(getattr(module, "config", None)) or PrefillSettings()
        index = getattr(module, "layer_idx", None)
        layer = -1 if index is None else index
        return cls(inputs, tokens, prefill, layer, settings, of_own_heads(settings.selector(layer), module, num_heads))

    def attention(self) -> Tensor:
        """Attention of the call, dense or over the blocks that its method keeps, (batch, num_heads, q_len, v_head_dim)."""
        if self.probe is not None:
            return self.probe(self)
        selector, options, run, reason = self.selector, self.settings.run_options, self.run, self.reason_no_mask()
        if reason is not None:
            options = options._replace(policy=_ALWAYS_DENSE)
        else:
            selector, reason = selector.for_inputs(self.inputs), self.reason_dense_layer()
            if reason is not None:
                # by SDPA's causal kernel where that can run, else under the block mask of all that is visible
                selector = replace(selector, method=METHODS["causal"], options={}, keeps_all=[True] * self.inputs.query.shape[1])
                options = options._replace(policy=options.policy._replace(dense_below=1))
        wanted = () if run is None or not run.collect_stats else STATISTICS if reason is None else ("density",)
        found = attend(self.inputs, selector, options, False, wanted, run is not None and run.collect_masks)
        if run is not None:
            stats = found.stats
            if stats is not None and reason is not None:
                stats = replace(stats, dense=True, is_dense=torch.ones_like(stats.is_dense))
            mask = joined_mask(found.selections, self.inputs.placed()) if found.selections else None
            run.record(self.layer, stats, mask, reason, self.prefill, self.size)
        return found.out

    @property
    def size(self) -> CallSize:
        """The sizes by which the call is recorded."""
        batch, _, q_len, _ = self.inputs.query.shape
        return CallSize(batch, q_len, self.tokens, self.sequence)

    def reason_no_mask(self) -> str | None:
        """Reason why no mask can be made or would pay, None where one would."""
        query, value = self.inputs.query, self.inputs.value
        assert value is not None
        for name, size in (("head_dim", query.shape[3]), ("v_head_dim", value.shape[3])):
            if size not in HEAD_DIMS:
                return f"{name} {size} outside {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}"
        return self.settings.run_options.policy.by_size(query.shape[2], self.tokens)

    def reason_dense_layer(self) -> str | None:
        """Reason why a layer stays dense at any length, None where it does not."""
        if self.layer in self.settings.dense_layers:
            return "in dense_layers"
        policy = self.settings.run_options.policy
        return policy.by_selection(self.selector.for_inputs(self.inputs).keeps_all) or policy.by_window(self.inputs.window)


def of_own_heads(selector: Selector, module: nn.Module, num_heads: int) -> Selector:
    """`selector` with the numbers by head of the `num_heads` heads that this process has of an attention module.

    Under tensor parallelism transformers gives the processes of a mesh equal shares of the heads, in order. Where no option is by
    head, or the module is not spread so, it is the selector itself: the call then refuses a wrong length.
    """
    own = {}
    for name in (*selector.method.shares, *selector.method.pairs):
        value = selector.options[name]
        by_head = isinstance(value, tuple) and (name in selector.method.shares or isinstance(value[0], tuple))
        if by_head and len(value) != num_heads and len(value) % num_heads == 0:
            rank = _rank(module, len(value) // num_heads)
            if rank is not None:
                own[name] = value[rank * num_heads : (rank + 1) * num_heads]
    return replace(selector, options={**selector.options, **own}) if own else selector


def _rank(module: nn.Module, processes: int) -> int | None:
    """Place of this process among `processes` that share the module's weights; None where these are not spread over so many."""
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = tuple(mesh.mesh_dim_names or ())
        # a mesh may hold other dimensions too, over which batches or layers are spread
        dim = names.index("tp") if "tp" in names else 0 if mesh.ndim == 1 and not names else None
        if dim is not None and mesh.size(dim) == processes:
            rank: int = mesh.get_local_rank(dim)
            return rank
    return None


def refusal(what: str, instead: str) -> NotImplementedError:
    """The error for what is not served."""
    return NotImplementedError(f"flexmask does not serve {what}; use {instead}")


def _inputs(query: Tensor, key: Tensor, value: Tensor, mask: PrefillMask | None, scores: dict[str, Any]) -> AttentionInputs:
    """The checked inputs, also of heads of a size that no mask is made for, which run dense."""
    where = dict(scores)
    if mask is not None:
        at_end = isinstance(mask.offset, int) and mask.offset == key.shape[2] - query.shape[2]
        where |= {"window": mask.window, "attention_mask": mask.attention_mask, "q_offset": None if at_end else mask.offset}
    if query.shape[3] in HEAD_DIMS and value.shape[3] in HEAD_DIMS:
        return attention_inputs(query, key, value, **where)
    # everything else is checked on heads that pass
    stand_ins = [x.new_empty(()).expand(*x.shape[:3], HEAD_DIMS[0]) for x in (query, key, value)]
    checked = attention_inputs(*stand_ins, **where)
    scale = query.shape[3] ** -0.5 if scores["scale"] is None else checked.scale
    return checked._replace(query=query, key=key, value=value, scale=scale)


def _check_causal(module: nn.Module, is_causal: bool | None, mask: Tensor | BlockMask | None) -> None:
    """Refuse attention that is not causal.

    Under a mask of ours the argument `is_causal` says nothing: some modules (GPT-2) pass False wherever they were given a mask,
    and a mask that is not causal holds its own refusal.
    """
    causal = getattr(module, "is_causal", True)
    if is_causal is not None and not isinstance(mask, PrefillMask):
        causal = is_causal
    if not causal:
        raise refusal("bidirectional or cross attention", f"{_SDPA} for the parts of the model that have it")


def _visibility(
    module: nn.Module, is_causal: bool | None, mask: Tensor | BlockMask | None, query: Tensor, key: Tensor
) -> PrefillMask:
    """The mask of a prefill call, or a refusal."""
    _check_causal(module, is_causal, mask)
    batch, _, q_len, _ = query.shape
    kv_len = key.shape[2]
    if mask is None and q_len == kv_len:
        return PrefillMask((batch, 1, q_len, kv_len), 0)
    if mask is None:
        raise refusal("a prefill without a mask over a cache", f"a (batch, kv_len) attention_mask, or {_SDPA}")
    if not isinstance(mask, PrefillMask):
        what = "a 4-D attention_mask"
        if MODELS_MAKE_4D_MASKS:
            what += (
                ", which in this release of transformers some models (OPT, BART, GraniteMoe, Persimmon, FalconH1) make themselves"
            )
            raise refusal(what, f"a newer release, {_SDPA}, or where the mask is yours a (batch, kv_len) one")
        raise refusal(what, f"a (batch, kv_len) attention_mask, or {_SDPA}")
    if mask.refusal is not None:
        raise refusal(mask.refusal, _SDPA)
    if tuple(mask.shape[2:]) != (q_len, kv_len):
        raise refusal(
            f"{q_len} rows and {kv_len} keys under a mask of {mask.shape[2]} and {mask.shape[3]} "
            "(keys that the model adds to those of its tokens, or a cache of another length)",
            _SDPA,
        )
    return mask


def _segments(mask: PrefillMask, query: Tensor, kwargs: dict[str, Any]) -> Segments | None:
    """The packed sequences of a call, None for one of single prompts.

    They come from the mask, which transformers makes of position_ids that start again where there is neither a cache nor an
    attention_mask, or from the caller's bounds. Positions that start again elsewhere are refused, as far as they are handed over
    at all: some models have three of each token.
    """
    batch, _, q_len, _ = query.shape
    rows, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    positions = kwargs.get("position_ids")
    if (
        mask.segments is None
        and isinstance(positions, Tensor)
        and positions.dim() == 2
        and positions.shape[1] == q_len
        and mask.packed.is_packed(positions, mask.attention_mask, mask.offset)
    ):
        raise refusal("packed sequences (position_ids that start again) over a cache or under an attention_mask", _UNPACK)
    if rows is None and keys is None:
        return mask.segments
    if rows is None or keys is None:
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must come together; got cu_seq_lens_{'k' if rows is None else 'q'} alone"
        )
    if mask.attention_mask is not None or mask.shape[3] != q_len:
        raise refusal("packed sequences (cu_seq_lens_q) over a cache or under an attention_mask", _UNPACK)
    segments = mask.bounds.segments(rows, keys, batch * q_len)
    if mask.segments is not None and mask.segments != tuple(each for each in segments if each.q_len):
        raise ValueError("cu_seq_lens_q must name the sequences that position_ids do, which start again elsewhere")
    return segments


def _row_of_keys(mask: Tensor, kv_len: int) -> Tensor:
    """The keys that a single row sees, (batch, 1, 1, kv_len) bool."""
    if mask.dtype != torch.bool:
        raise refusal("a 4-D attention_mask of numbers", "one of booleans, True = visible")
    return mask[..., :kv_len]
