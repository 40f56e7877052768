"""The geometry of a forward pass, which transformers' mask functions pass on to its attention without a map of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from flexmask._torch import is_readable, is_traced
from flexmask.integrations.huggingface.compat import classify_mask_function, q_len_and_offset
from flexmask.integrations.huggingface.packed import GivenBounds, PackedCheck, Segments, segments_of_ids
from flexmask.integrations.huggingface.scope import Scope, restore_attention_name, scope_of

_REFUSAL = "a mask beyond causality, padding and a sliding window (chunked attention, a bidirectional part)"
_PACKED_IN_COMPILE = (
    "packed sequences inside torch.compile, or a prompt that may hold some (use_cache=False and no attention_mask)"
)
SCOPE_ENDED = (
    "flexmask's mask of a prefill is used after its sparse_prefill block has ended; call backward inside the block, since it "
    "runs checkpointed layers again, and keep no mask beyond the block"
)


class MaskNotServed(NotImplementedError, AttributeError):
    """A model read more of its mask than `GeometryMask` has. The class is an AttributeError so that ``hasattr`` works."""


class ForwardPass:
    """The scope and plans of the layers under one mask in a forward pass. A model makes one mask for each kind of layer."""

    def __init__(self) -> None:
        self._scope_is_known = False
        self._scope: ReferenceType[Scope] | None = None  # weak: a scope is open while its block holds it
        self.plans: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()  # by mask: plans of its layers (call.py)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardPass, ()

    def scope(self, module: nn.Module) -> Scope | None:
        """The first layer's scope; also returned when backward recomputes checkpointed layers."""
        if not self._scope_is_known:
            scope = scope_of(module)
            self._scope_is_known, self._scope = True, None if scope is None else ref(scope)
        if self._scope is None:
            return None
        scope = self._scope()
        if scope is None or scope.is_closed:
            raise MaskNotServed(SCOPE_ENDED)
        return scope


class GeometryMask(BlockMask):
    """The geometry of a forward pass; a BlockMask only to pass through transformers unchanged.

    Heads and contiguous rows can be sliced: ``mask[:, heads, rows, :]``. Other uses raise `MaskNotServed`, also those by another
    attention after the block. `offset` is the position of the first row among the keys: an int, or a 0-d integer tensor where
    only the device has it. `attention_mask` is (batch, kv_len) bool, True = token. `seq_len` is the number of tokens so far,
    including this call's; with a StaticCache, whose length is on the device, that of the padding mask, or without one that of
    this call.
    """

    _config: Any = None
    _attention_name: str | None = None  # in the config, when the mask was made

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        offset: int | Tensor,
        attention_mask: Tensor | None = None,
        window: int | None = None,
        refusal: str | None = None,
        seq_len: int | None = None,
        segments: Segments | None = None,
        config: Any = None,
    ) -> None:
        # without BlockMask.__init__, which needs lists
        self._shape = shape  # (batch, 1, q_len, kv_len)
        self._config, self._attention_name = config, getattr(config, "_attn_implementation", None)
        self.seq_len = seq_len if seq_len is not None else shape[2] + (offset if isinstance(offset, int) else 0)
        self.offset, self.attention_mask, self.window, self.refusal = offset, attention_mask, window, refusal
        self.segments = segments  # packed sequences, in tokens of all batch rows concatenated
        # shared by all layers, also under slices of this mask
        self.packed, self.bounds = PackedCheck(), GivenBounds()
        # inside torch.compile a new object in each call would recompile each time
        self.forward_pass = None if is_traced() else ForwardPass()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def ndim(self) -> int:
        return 4

    def __repr__(self) -> str:
        return f"GeometryMask(shape={self._shape}, window={self.window}, padded={self.attention_mask is not None})"

    __str__ = __repr__

    def contiguous(self) -> GeometryMask:
        """Return self, for generate()."""
        return self

    def to(self, device: torch.device | str, *args: Any, **kwargs: Any) -> GeometryMask:
        offset = self.offset.to(device) if isinstance(self.offset, Tensor) else self.offset
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        # the same object if nothing changes: `ForwardPass` keeps plans by mask
        return self if offset is self.offset and mask is self.attention_mask else self._with_geometry(self._shape, offset, mask)

    def __getitem__(self, index: Any) -> GeometryMask:
        """Some of the rows; keeps all dimensions, as BlockMask does."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
            dim = parts.index(Ellipsis)
            parts[dim : dim + 1] = [slice(None)] * (5 - len(parts))
        parts += [slice(None)] * (4 - len(parts))
        batch, _, q_len, kv_len = self._shape
        unsliced = {0: batch, 3: kv_len}
        if len(parts) != 4 or any(
            not isinstance(parts[dim], slice) or parts[dim].indices(size) != (0, size, 1) for dim, size in unsliced.items()
        ):
            self._refuse_use(f"[{index}] beyond heads and rows")
        if isinstance(parts[1], int) and not -1 <= parts[1] < 1:
            raise IndexError(f"head must be in [-1, 1); got {parts[1]}")
        rows = slice(parts[2], parts[2] + 1 or None) if isinstance(parts[2], int) else parts[2]
        if not isinstance(rows, slice) or rows.indices(q_len)[2] != 1:
            self._refuse_use(f"[{index}] of rows that do not follow one another")
        first_row, end_row, _ = rows.indices(q_len)
        if self.segments is not None and (first_row, end_row) != (0, q_len):
            self._refuse_use(f"[{index}] of packed sequences")
        return self._with_geometry((batch, 1, max(end_row - first_row, 0), kv_len), self.offset + first_row, self.attention_mask)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse_use(f".{name}")

    def _refuse_arithmetic(self, other: Any = None) -> NoReturn:
        self._refuse_use("numbers")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __neg__ = _refuse_arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __truediv__ = __rtruediv__ = _refuse_arithmetic

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """Refuse torch's own functions, such as SDPA."""
        operands = [*args, *(kwargs or {}).values()]
        operands += [part for operand in operands if isinstance(operand, (list, tuple)) for part in operand]
        masks = [operand for operand in operands if isinstance(operand, GeometryMask)]
        (masks[0] if masks else GeometryMask((1, 1, 1, 1), 0))._refuse_arithmetic()

    def _refuse_use(self, what: str) -> NoReturn:
        if getattr(self._config, "_attn_implementation", None) != self._attention_name:
            raise MaskNotServed(SCOPE_ENDED)
        raise MaskNotServed(
            f"flexmask cannot run a model whose code uses its attention mask's {what}, for a sparse attention of its own, say; "
            'use attn_implementation="sdpa"'
        )

    def _with_geometry(
        self, shape: tuple[int, int, int, int], offset: int | Tensor, attention_mask: Tensor | None
    ) -> GeometryMask:
        mask = GeometryMask(shape, offset, attention_mask, self.window, self.refusal, self.seq_len, self.segments, self._config)
        mask._attention_name = self._attention_name
        mask.forward_pass, mask.packed, mask.bounds = self.forward_pass, self.packed, self.bounds
        return mask


def mask_for_transformers(*, config: Any = None, **arguments: Any) -> Any:
    """The mask function for transformers: `geometry_mask`, or that of the model's own attention if no block is open."""
    if not is_traced() and restore_attention_name(config):
        own_function = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)
        return None if own_function is None else own_function(config=config, **arguments)
    return geometry_mask(config=config, **arguments)


def geometry_mask(**arguments: Any) -> GeometryMask | Tensor | None:
    """The mask of a forward pass; a single row gets SDPA's. ValueError if `attention_mask` ends before the last query row."""
    q_len, first_row = q_len_and_offset(arguments)
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments) if q_len == 1 else _prefill_mask(q_len, first_row, **arguments)


def _prefill_mask(
    q_len: int,
    first_row: int | Tensor,
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> GeometryMask:
    # do not wait for a position that is on a device
    known_row = _int_if_known(first_row)
    if attention_mask is not None and isinstance(known_row, int) and not is_traced():
        expected = (batch_size, known_row + q_len)
        if attention_mask.shape[1] < expected[1]:
            raise ValueError(f"attention_mask must be (batch, all tokens so far) = {expected}; got {tuple(attention_mask.shape)}")
    shape = (batch_size, 1, q_len, kv_length)
    # with as many rows as keys, the first row is at the first key
    offset = 0 if q_len == kv_length else _int_if_known(first_row - kv_offset)
    is_known, window, ids = classify_mask_function(mask_function, local_size)
    if not is_known or (ids is not None and is_traced()):
        return GeometryMask(shape, offset, refusal=_PACKED_IN_COMPILE if is_known else _REFUSAL, config=config)
    if ids is not None:
        # packed sequences come without a cache and without padding
        return GeometryMask(shape, offset, window=window, segments=segments_of_ids(ids, batch_size), config=config)
    seq_len = None
    if not isinstance(offset, int) and attention_mask is not None and isinstance(kv_offset, int):
        seq_len = min(kv_length, attention_mask.shape[1] - kv_offset)
    padding = _key_padding_mask(attention_mask, kv_length, kv_offset)
    return GeometryMask(shape, offset, padding, window, seq_len=seq_len, config=config)


def _int_if_known(number: int | Tensor) -> int | Tensor:
    """`number` as an int if it is on a CPU, where reading it does not wait."""
    if type(number) is Tensor and number.device.type == "cpu" and not is_traced():
        return int(number)
    return number


def _key_padding_mask(attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor) -> Tensor | None:
    """The padding mask, (batch, kv_length), or None without padding. A cache may hold fewer or more keys than the prompt."""
    if attention_mask is None or (is_readable(attention_mask) and bool(attention_mask.all())):
        return None
    position = torch.arange(kv_length, device=attention_mask.device) + kv_offset
    is_token = position < attention_mask.shape[1]
    return (attention_mask[:, position.clamp(max=attention_mask.shape[1] - 1)] != 0) & is_token
