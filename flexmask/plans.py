"""A plan: what attention calls of one kind have in common, computed and checked once, and run for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from flexmask._torch import in_dispatch_mode, is_traced
from flexmask.attend import AttentionResult, attend_heads, write_group_output
from flexmask.base.checks import check_bool, check_plain
from flexmask.base.inputs import AttentionInputs, HeadGroup, in_autocast_dtype, needs_gradients, without_autocast
from flexmask.base.selection import Selection
from flexmask.call_options import CallOptions
from flexmask.dense_policy import CPU_BREAK_EVEN, sdpa_computes
from flexmask.flex.backend import Backend, check_compiled_code_takes, chosen_backend
from flexmask.flex.dense import dense_attention
from flexmask.flex.last_rows import LastRows, last_rows_in_parts
from flexmask.method import METHODS, FittedMethod
from flexmask.selection.prepare import PreparedSelection, prepare_selection, with_replay
from flexmask.selection.select import select_blocks
from flexmask.stats import STATISTICS, dense_stats, merge_group_stats


class GroupPlan(NamedTuple):
    """The plan of one group of heads: its prepared selection, and what of it runs dense."""

    group: HeadGroup
    prepared: PreparedSelection
    dense_kv_heads: tuple[bool, ...]  # True: the KV head runs dense, whatever its mask
    last_rows: LastRows | None = None  # rows that keep every visible block, for direct calls of FLASH


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Geometry, call options, backend and groups of heads that attention calls of one kind share. From `flexmask.plan`.

    Attributes
    ----------
    reason
        Why the calls run dense; None if they run sparse. Without `group_plans` they run as dense attention, with them under masks
        that keep every visible block.
    """

    inputs: AttentionInputs  # the geometry, checked
    call_options: CallOptions
    reason: str | None
    backend: Backend
    return_lse: bool = False
    group_plans: tuple[GroupPlan, ...] = ()  # none: the whole call is dense attention
    break_even_density: float | None = None  # a KV head of a larger density runs dense
    offset: Tensor | None = None  # the offset of `PositionedInputs`
    absent: Tensor | None = None  # (batch, 1, kv_len, 1) bool: keys that are not tokens

    def __repr__(self) -> str:
        method = f"{self.group_plans[0].prepared.method.name}, " if self.group_plans else ""
        query, key = tuple(self.inputs.query.shape), tuple(self.inputs.key.shape)
        dense = "" if self.reason is None else f", dense: {self.reason}"
        return f"Plan({method}query {query}, key {key}, backend {self.backend.name!r}{dense})"

    def run(self, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None = None, return_stats: bool = False) -> Any:
        """Select and attend, as `flexmask.sparse_attention` does with the arguments of the plan.

        Parameters
        ----------
        query, key, value, sinks
            Tensors of the planned shapes, dtypes and device; `sinks` if and only if the plan was made with some.
        return_stats
            Also return `SelectionStats`.

        Returns
        -------
        Tensor
            (batch, num_heads, q_len, v_head_dim), and what `flexmask.sparse_attention` returns after it.

        Raises
        ------
        TypeError, ValueError
            For tensors that the plan was not made for, or that need gradients if it was made without.
        RuntimeError
            As `flexmask.sparse_attention`.
        """
        check_bool("return_stats", return_stats)
        return self.attend(self.checked_inputs(query, key, value, sinks), STATISTICS if return_stats else ()).as_returned()

    def checked_inputs(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> AttentionInputs:
        """The inputs of a call, in the dtype of autocast; raises as `run` for tensors that the plan was not made for."""
        tensors = {
            "query": in_autocast_dtype(query),
            "key": in_autocast_dtype(key),
            "value": in_autocast_dtype(value),
            "sinks": sinks,
        }
        for name, tensor in tensors.items():
            planned = getattr(self.inputs, name)
            if planned is None or not isinstance(tensor, Tensor):
                if tensor is not planned:
                    expected = "None" if planned is None else "a tensor"
                    raise TypeError(f"{name} must be {expected}, as planned; got {type(tensor).__name__}")
                continue
            check_plain(name, tensor)
            for attribute in ("shape", "dtype", "device"):
                expected, actual = getattr(planned, attribute), getattr(tensor, attribute)
                if actual != expected:
                    shown = tuple if attribute == "shape" else str
                    raise ValueError(f"{name} must have the {attribute} {shown(expected)}, as planned; got {shown(actual)}")
        if needs_gradients(query, key, value, sinks) and not self.inputs.needs_grad:
            raise ValueError("query, key, value and sinks must not require gradients: the plan was made without")
        inputs = self.inputs.with_fields(**tensors)
        if self.group_plans:
            # a mode may be on that was not when the plan was made
            check_compiled_code_takes(inputs)
        return inputs

    def without_tensors(self) -> Plan:
        """The plan with the shapes, but not the memory, of the query, key, value and sinks that it was made with."""
        shapes = {name: getattr(self.inputs, name) for name in ("query", "key", "value", "sinks")}
        empty = {name: None if x is None else x.detach().new_empty(()).expand(x.shape) for name, x in shapes.items()}
        return replace(self, inputs=self.inputs.with_fields(**empty))

    def with_replay(self) -> Plan:
        """The plan for several layers: selections of later layers replay the launches of an earlier one."""
        group_plans = [plan._replace(prepared=with_replay(plan.prepared)) for plan in self.group_plans]
        return replace(self, group_plans=tuple(group_plans))

    def attend(
        self, inputs: AttentionInputs, statistics: tuple[str, ...] = (), *, with_maps: bool = False, with_counts: bool = False
    ) -> AttentionResult:
        """Select and attend, outside of autocast, without comparing the inputs with the plan.

        The result also has what is requested: `statistics` by name, the selections with their maps, the counts of kept blocks.
        """
        with without_autocast(inputs.query.device):
            if not self.group_plans:
                stats = dense_stats(inputs.query) if statistics else None
                return AttentionResult(*dense_attention(inputs, self.return_lse), stats)
            # masks of every block need no statistics
            measured = statistics if self.reason is None else ()
            whole = inputs.for_attention_with(self.offset, self.absent)
            outputs, dense_by_group = None, []
            group_stats: list[dict[str, Tensor]] = []
            selections: list[tuple[HeadGroup, Selection]] = []
            counts: list[Tensor] = []
            for group, prepared, dense_kv_heads, last_rows in self.group_plans:
                # only one group's lists exist at a time
                part, selection, backend = whole.slice_heads(group), None, self.backend
                if measured or with_maps or with_counts or not all(dense_kv_heads):
                    selection = select_blocks(prepared, part, with_maps, measured)
                    group_stats.append(selection.stats)
                    if with_maps:
                        selections.append((group, selection))
                    if with_counts:
                        counts += [selection.lists.kv_num_blocks, selection.lists.full_kv_num_blocks]
                    backend = self._backend_of(inputs, group, selection)
                out, lse, ran_dense = attend_heads(
                    part, selection, dense_kv_heads, self.break_even_density, backend, self.return_lse, last_rows
                )
                outputs = write_group_output(outputs, (out, lse), group, inputs.query)
                dense_by_group.append(ran_dense)
            assert outputs is not None
            stats = None
            if statistics and measured:
                stats = merge_group_stats(group_stats, [group_plan.group for group_plan in self.group_plans], dense_by_group)
            elif statistics:
                stats = dense_stats(inputs.query)
            return AttentionResult(*outputs, stats, tuple(selections), tuple(counts))

    def _backend_of(self, inputs: AttentionInputs, group: HeadGroup, selection: Selection) -> Backend:
        """The plan's backend, chosen again where heads share a list, a mask_mod hides more, or torch traces the call."""
        # FLASH packs a KV head's query heads into one tile if they share a list
        shares_lists = selection.lists.kv_num_blocks.shape[1] < group.query_heads.stop - group.query_heads.start
        has_mask_mod = selection.mask_mod is not None
        # torch traces no direct call
        if not shares_lists and not (self.backend.is_direct and (has_mask_mod or is_traced())):
            return self.backend
        named, size, part = self.call_options.backend, selection.block_size, inputs.slice_heads(group)
        return chosen_backend(named, part, size, self.return_lse, shares_lists=shares_lists, has_mask_mod=has_mask_mod)


def plan_call(
    inputs: AttentionInputs,
    method: FittedMethod,
    call_options: CallOptions,
    return_lse: bool = False,
    *,
    layer: int | None = None,
    at_any_length: bool = False,
) -> Plan:
    """Decide what runs dense, and plan.

    A call runs dense below the policy's size (unless `at_any_length`), in layers that the policy names, and if all its heads
    keep every block. A named layer that SDPA's causal kernel cannot compute (padding, a chunk, a window, a soft cap, sinks)
    runs under masks of every visible block instead. Otherwise heads are planned in groups, and KV heads that keep every block
    run dense.
    """
    policy, keeps_every_block = call_options.policy, method.keeps_every_block_by_head(inputs.query.shape[1])
    has_sdpa_kernel = sdpa_computes(inputs)
    heads_may_be_dense = has_sdpa_kernel and policy.dense_below > 0 and not return_lse
    selection_reason = policy.selection_reason(keeps_every_block)
    size_reason = None if at_any_length else policy.size_reason(inputs.query.shape[2], inputs.key.shape[2])
    layer_reason = None if layer is None else policy.dense_layer_reason(layer, inputs.window) or selection_reason
    reason = size_reason or layer_reason or (selection_reason if heads_may_be_dense else None)
    if reason is not None:
        if has_sdpa_kernel or size_reason is not None:
            return dense_plan(inputs, method.block_size, call_options, reason, return_lse, has_mask_mod=method.is_user_method)
        # where SDPA's causal kernel cannot compute a dense layer, it would read a map of all pairs
        method = METHODS["causal"].checked(method.block_size, {}).for_inputs(inputs)
    dense_kv_heads, break_even_density = (False,) * inputs.key.shape[1], None
    # while torch.compile traces, nothing would order the emptying of lists before the kernel that reads them
    if heads_may_be_dense and not inputs.needs_grad and not is_traced():
        dense_kv_heads, break_even_density = _dense_kv_heads(inputs, method, keeps_every_block)
    return _plan_in_groups(inputs, method, call_options, reason, return_lse, dense_kv_heads, break_even_density)


def _dense_kv_heads(
    inputs: AttentionInputs, method: FittedMethod, keeps_every_block: list[bool]
) -> tuple[tuple[bool, ...], float | None]:
    """True for KV heads whose query heads keep every block; and the density above which another runs dense, or None."""
    num_kv_heads = inputs.key.shape[1]
    queries_per_kv = len(keeps_every_block) // num_kv_heads
    dense = tuple([all(keeps_every_block[head * queries_per_kv : (head + 1) * queries_per_kv]) for head in range(num_kv_heads)])
    # reading lists waits, except on a CPU; a user's function may hide what dense attention sees
    may_read_lists = inputs.query.device.type == "cpu" and not in_dispatch_mode() and not method.is_user_method
    return dense, CPU_BREAK_EVEN[inputs.query.dtype] if may_read_lists else None


def dense_plan(
    inputs: AttentionInputs,
    block_size: int,
    call_options: CallOptions,
    reason: str,
    return_lse: bool = False,
    has_mask_mod: bool = False,
) -> Plan:
    """Plan dense attention; a backend that is chosen by name and cannot run is refused, whatever the length."""
    backend = chosen_backend(call_options.backend, inputs, block_size, return_lse, is_dense=True, has_mask_mod=has_mask_mod)
    return Plan(inputs, call_options, reason, backend, return_lse)


def _plan_in_groups(
    inputs: AttentionInputs,
    method: FittedMethod,
    call_options: CallOptions,
    reason: str | None,
    return_lse: bool,
    dense_kv_heads: tuple[bool, ...],
    break_even_density: float | None,
) -> Plan:
    groups = method.groups(inputs, call_options.max_mask_bytes)
    # a group may have fewer query heads per KV head
    first_group = inputs.slice_heads(groups[0]) if len(groups) > 1 else inputs
    backend = chosen_backend(call_options.backend, first_group, method.block_size, return_lse, has_mask_mod=method.is_user_method)
    whole = inputs.with_offset()
    group_plans: list[GroupPlan] = []
    in_parts = backend.is_direct and backend.has_lse and method.last_rows_are_dense() and inputs.window is None
    last_rows_by_size: dict[tuple[int, ...], LastRows | None] = {}  # by batch and heads of a group
    for group in groups:
        same_rows = next((plan.prepared for plan in group_plans if plan.group.batch_rows == group.batch_rows), None)
        group_method, group_inputs = method.slice_heads(group.query_heads), whole.slice_heads(group)
        prepared = prepare_selection(group_method, group_inputs, same_rows, call_options.max_mask_bytes)
        group_size = group_inputs.query.shape[:2]
        if in_parts and group_size not in last_rows_by_size and not all(dense_kv_heads[group.kv_heads]):
            last_rows_by_size[group_size] = last_rows_in_parts(group_inputs, method.block_size)
        group_plans.append(GroupPlan(group, prepared, dense_kv_heads[group.kv_heads], last_rows_by_size.get(group_size)))
    absent = inputs.absent_keys()
    return Plan(inputs, call_options, reason, backend, return_lse, tuple(group_plans), break_even_density, whole.offset, absent)
