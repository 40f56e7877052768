"""The model class "flexmask" of lm-evaluation-harness."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from flexmask.integrations.huggingface.compat import check_servable, unwrapped
from flexmask.integrations.huggingface.model_config import model_settings
from flexmask.integrations.huggingface.prefill import opened, warn_unreached
from flexmask.integrations.huggingface.registration import register
from flexmask.integrations.lm_eval.arguments import check_known, split_arguments
from flexmask.integrations.lm_eval.batches import row_lengths, rows_alike
from flexmask.integrations.lm_eval.densities import Densities
from flexmask.integrations.lm_eval.greedy import decode, decodes_greedily, ends_of
from flexmask.integrations.record import PrefillRun

_log = logging.getLogger("flexmask")


@register_model("flexmask")
class FlexmaskLM(HFLM):
    """The harness's Hugging Face model with a sparse prefill; decoding is dense.

    Serves `loglikelihood`, `loglikelihood_rolling` and `generate_until`, with chat templates, `batch_size="auto"` and data
    parallelism. The results' ``config`` hold ``flexmask``: version, options, and mean density, also by prompt length.

    A prompt's scores do not depend on its batch, which `rows_alike` splits. Log-likelihood batches and greedy generation pad on
    the right, other generation on the left.

    Parameters
    ----------
    pretrained
        Name or folder of a model, or the model.
    settings
        A PrefillSettings, its dict, or a JSON file of that dict, such as a ``config.json``. Single options override it. Default:
        none.
    collect_stats
        Measure densities; costs a little time. Default True.
    arguments
        The options of `flexmask.sparse_prefill`, and those of the harness's ``hf`` model. `backend` is flexmask's if it is
        "auto", "triton" or "flash". Without an option of flexmask: those in the model's config, else the defaults.

    Raises
    ------
    TypeError, ValueError
        For unknown options, with close matches, and values out of range.
    NotImplementedError
        For a model that flexmask does not serve.

    Examples
    --------
    ``python -m flexmask.integrations.lm_eval --model flexmask --model_args pretrained=FOLDER,method=hybrid,gamma=0.95
    --tasks niah_single_1 --metadata 'max_seq_lengths=[32768]'``
    """

    def __init__(self, pretrained: Any, *, settings: Any = None, collect_stats: bool = True, **arguments: Any) -> None:
        chosen, rest = split_arguments({**arguments, "settings": settings})
        if not isinstance(pretrained, str):  # the harness drops what is left over
            check_known(rest, _parameters(HFLM.__init__), None)
        register()
        self._row_lengths: deque[int] | None = None
        self._collect_stats = collect_stats
        self.densities = Densities()
        super().__init__(pretrained, **rest)
        self._inner = unwrapped(self.model)
        check_servable(self._inner)
        self.settings = model_settings(self._inner, settings=chosen)
        self._warned = False

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        check_known(kwargs, _parameters(HFLM._create_model), self.config)
        super()._create_model(*args, **kwargs)

    @contextmanager
    def _sparse(self, lengths: Sequence[int] | None) -> Iterator[None]:
        run = PrefillRun(self.settings, self._collect_stats)
        with opened(self._inner, run):
            yield
        if run.unreached and not self._warned:
            self._warned = True
            warn_unreached(self._inner)
        if lengths is not None:
            self.densities.add(run, lengths)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        """Note the lengths of rows, which the harness pads without a mask."""
        self._row_lengths = deque(row_lengths(requests, self.max_length, self.logits_cache))
        try:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        finally:
            self._row_lengths = None

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Run the trial batches of ``batch_size="auto"`` without noted lengths."""
        lengths, self._row_lengths = self._row_lengths, None
        try:
            return super()._detect_batch_size(requests, pos)
        finally:
            self._row_lengths = lengths

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits of a batch padded on the right."""
        if self._row_lengths is None:
            with self._sparse(None):
                return super()._model_call(inps, attn_mask, labels)
        lengths = [self._row_lengths.popleft() for _ in range(inps.shape[0])]
        _check_padding(inps, lengths)
        parts = rows_alike(lengths, self.settings, padded_left=False, on_cpu=self.device.type == "cpu")
        if len(parts) == 1:
            return self._masked_logits(inps, lengths)
        whole: Tensor | None = None
        for rows in parts:
            own = [lengths[row] for row in rows]
            logits = self._masked_logits(inps[rows, : max(own)], own)
            if whole is None:
                # a learned prompt (PEFT) precedes the tokens
                before = logits.shape[1] - max(own)
                whole = logits.new_zeros(len(lengths), before + inps.shape[1], logits.shape[2])
            whole[rows, : logits.shape[1]] = logits
        assert whole is not None
        return whole

    def _masked_logits(self, inps: Tensor, lengths: Sequence[int]) -> Tensor:
        mask = torch.arange(inps.shape[1], device=inps.device) < torch.tensor(lengths, device=inps.device)[:, None]
        with torch.no_grad(), self._autocast(), self._sparse(lengths):
            return self.model(inps, attention_mask=mask.long()).logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """The batch, padded on the left, followed by new tokens."""
        mask = generation_kwargs.pop("attention_mask", torch.ones_like(context))
        lengths = mask.sum(1).tolist()
        found: list[Tensor] = [context] * len(lengths)
        greedily = self.model is self._inner and decodes_greedily(self._inner, generation_kwargs)
        for rows in rows_alike(lengths, self.settings, padded_left=not greedily, on_cpu=self.device.type == "cpu"):
            own = [lengths[row] for row in rows]
            cut = context.shape[1] - max(own)
            if greedily and len(set(own)) > 1:
                prompts = [context[row, context.shape[1] - lengths[row] :] for row in rows]
                added = self._decode(prompts, max_length - context.shape[1], stop)
                part: Any = [torch.cat([context[row, cut:], tokens]) for row, tokens in zip(rows, added, strict=True)]
            else:
                options = {**generation_kwargs, "attention_mask": mask[rows, cut:]}
                with self._sparse(own):
                    part = super()._model_generate(context[rows, cut:], max_length - cut, stop, **options)
            for row, tokens in zip(rows, part, strict=True):
                found[row] = torch.cat([context[row, :cut], tokens])
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=self.tokenizer.pad_token_id)

    def _decode(self, prompts: Sequence[Tensor], limit: int, stop: Sequence[str]) -> list[Tensor]:
        """Tokens up to the model's end token, a stop string, or `limit`."""
        ends = ends_of(self._inner)
        # other tokens may spell the same string, as in the harness's criterion
        reach = max((len(self.tokenizer.encode(each, add_special_tokens=False)) + 2 for each in stop), default=0)

        def is_done(tokens: list[int]) -> bool:
            if tokens[-1] in ends:
                return True
            text = self.tokenizer.decode(tokens[-reach:]) if stop else ""
            return any(each in text for each in stop)

        with self._autocast():
            found = decode(self._inner, prompts, limit, is_done, self._sparse([len(each) for each in prompts]))
        return [torch.tensor(tokens, device=prompts[0].device) for tokens in found]

    def _autocast(self) -> Any:
        dtype = self.mixed_precision_dtype
        return nullcontext() if dtype is None else torch.autocast(device_type=self.device.type, dtype=dtype)

    def get_model_info(self) -> dict[str, Any]:
        densities = self.densities.summary()
        if densities["prompts"] and densities["dense_prompts"] == densities["prompts"]:
            number, reason = densities["prompts"], next(iter(densities["dense_because"]))
            _log.warning("flexmask: all %d prompts ran dense, so these are the dense model's scores: %s", number, reason)
        method = self.settings.method
        options = {"method": getattr(method, "__name__", repr(method))} if callable(method) else self.settings.to_dict()
        version = importlib.import_module("flexmask").__version__
        return {**super().get_model_info(), "flexmask": {"version": version, "options": options, **densities}}


def _parameters(function: Any) -> set[str]:
    found = inspect.signature(function).parameters.values()
    return {each.name for each in found if each.kind is not each.VAR_KEYWORD}


def _check_padding(inps: Tensor, lengths: Sequence[int]) -> None:
    after = torch.arange(inps.shape[1], device=inps.device) >= torch.tensor(lengths, device=inps.device)[:, None]
    if max(lengths) != inps.shape[1] or bool(inps[after].any()):
        raise RuntimeError(
            "this release of lm-evaluation-harness batches in another order than 0.4.13: "
            f"rows of {lengths} tokens were expected, a batch of {tuple(inps.shape)} came"
        )
