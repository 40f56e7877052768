"""Time to first token of a Hugging Face model, dense and with FlexPrefill: ``python -m bench.hf --model PATH_OR_NAME``.

Prints one table: time to first token, where it goes, memory, density, and whether the generated tokens are those of dense
attention. ``--shape`` takes a known model's shape with random weights instead; their density means nothing, so that ``--density``
forces one by random blocks. Over several GPUs: ``torchrun --nproc-per-node 2 -m bench.hf --tensor-parallel ...``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bench.forced_density import random_blocks_mask
from bench.measure import synchronize
from bench.retriever.task import make_prompt
from bench.stages import GLUE, grouped, kernels_of
from flexmask.integrations.huggingface import FlexPrefillRun, flexprefill

# the sizes that the models' own config.json name; no weights
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": (
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072 + 256,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-8b": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 131072 + 256,
        },
    ),
}
_RETRIEVER = Path(__file__).parent / "retriever" / "model"


@dataclass
class Measured:
    """One way of attention on one prompt.

    Attributes
    ----------
    method : str
    prompt_tokens : int
    seconds : float
        Time to first token: median of the prefills after the first, which compiles.
    first_seconds : float
        Of the prefill that compiles.
    attention_ms, mask_ms, rest_ms : float or None
        GPU time of one prefill: attention kernels, FlexPrefill's, all others. None without a GPU.
    peak_gb : float or None
        Peak device memory, weights and the first generated tokens included.
    density : float or None
        Kept share of the visible blocks, mean of layers and heads.
    tokens : list of int
        What it generates, greedily.
    """

    method: str
    prompt_tokens: int
    seconds: float
    first_seconds: float
    attention_ms: float | None
    mask_ms: float | None
    rest_ms: float | None
    peak_gb: float | None
    density: float | None
    tokens: list[int]


def load(options: argparse.Namespace) -> Any:
    """The model that the command line names, on its device."""
    if options.tensor_parallel:
        return _load_parallel(options)
    if options.shape:
        return random_model(options)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    return loaded.to(options.device).eval()


def _load_parallel(options: argparse.Namespace) -> Any:
    """The part of the model that falls to this process; random weights go through a checkpoint that the first process writes."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        paths = [options.model or folder]
        if options.shape and dist.get_rank() == 0:
            random_model(options).save_pretrained(folder)
        dist.broadcast_object_list(paths, 0)
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(paths[0], dtype=dtype, attn_implementation="sdpa", tp_plan="auto").eval()
        dist.barrier()  # the folder stays until every process has read it
    return model


def random_model(options: argparse.Namespace) -> Any:
    """A model of random weights in the shape that the command line names, made on its device."""
    family, sizes = SHAPES[options.shape]
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    config = AutoConfig.for_model(family.lower(), **{**sizes, **layers})
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with torch.device(options.device):
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def prompt_ids(options: argparse.Namespace, tokens: int, vocab_size: int) -> Tensor:
    """(1, tokens): the text of a file, needles for the retriever, else seeded random tokens."""
    if options.text:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        ids = tokenizer(Path(options.text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
        if ids.shape[1] < tokens:
            raise ValueError(f"--text must hold {tokens} tokens; got {ids.shape[1]}")
        return ids
    if options.model and Path(options.model).resolve() == _RETRIEVER.resolve():
        return make_prompt(tokens, 16, 1, 0).token_ids[None]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(1000, vocab_size // 2), vocab_size, (1, tokens), generator=generator)


@torch.no_grad()
def prefill(model: Any, ids: Tensor, chunk: int | None = None) -> tuple[Tensor, DynamicCache]:
    """The logits of the last position, and the cache; in chunks of `chunk` tokens or at once."""
    cache = DynamicCache(config=model.config)
    for part in ids.split(chunk or ids.shape[1], 1):
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1], cache


@torch.no_grad()
def generated(model: Any, logits: Tensor, cache: DynamicCache, number: int) -> list[int]:
    """The next `number` tokens after a prefill, greedily."""
    tokens = [logits.argmax(-1, keepdim=True)]
    while len(tokens) < number:
        logits = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        tokens.append(logits.argmax(-1, keepdim=True))
    return [int(token) for token in tokens]


def measure(model: Any, ids: Tensor, name: str, options: argparse.Namespace) -> Measured:
    """Everything about the attention that the model is set to, but for the density."""
    on_gpu = ids.is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(1 + options.prefills):
        synchronize()
        start = time.perf_counter()
        logits, cache = prefill(model, ids, options.chunk)
        logits.argmax().item()
        times.append(time.perf_counter() - start)
        if len(times) == 1:
            tokens = generated(model, logits, cache, options.new_tokens)
        del logits, cache
    peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    stages = dict[str, float]()
    if on_gpu:
        stages, _ = grouped([kernels_of(partial(prefill, model, ids, options.chunk))])
    return Measured(
        name,
        ids.shape[1],
        statistics.median(times[1:]),
        times[0],
        stages.get("attention"),
        sum(value for stage, value in stages.items() if stage not in ("attention", GLUE)) if on_gpu else None,
        stages.get(GLUE),
        peak,
        None,
        tokens,
    )


def density_of(model: Any, ids: Tensor, options: argparse.Namespace) -> float:
    """The kept share of the visible blocks, mean of layers and heads, in a prefill of its own: statistics cost time."""
    with flexprefill(model, options.gamma, options.tau, **below(options)) as run:
        prefill(model, ids, options.chunk)
    return float(torch.stack([stats.density.mean() for calls in run.stats.values() for stats in calls]).mean())


def below(options: argparse.Namespace) -> dict[str, Any]:
    """`dense_below` where the command line names it."""
    return {} if options.dense_below is None else {"dense_below": options.dense_below}


def ways(model: Any, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Each way of attention: its name, and the block that switches it on and yields the run, or None."""
    on_gpu = torch.device(options.device).type == "cuda"
    if on_gpu:
        yield "dense (SDPA, cuDNN)", lambda: _dense(SDPBackend.CUDNN_ATTENTION)
    if not on_gpu or options.default_sdpa:
        yield "dense (SDPA)", nullcontext
    if not options.density or not options.shape:
        name = f"FlexPrefill, gamma {options.gamma:g}"
        yield name, partial(flexprefill, model, options.gamma, options.tau, collect_stats=False, **below(options))
    for density in options.density:
        method = partial(random_blocks_mask, density=density)
        yield f"random blocks, {density:g}", partial(flexprefill, model, method=method, **below(options))


@contextmanager
def _dense(backend: SDPBackend) -> Iterator[None]:
    with sdpa_kernel([backend, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def table(rows: Sequence[Measured]) -> str:
    """The rows of one prompt length, times as ratios to dense attention's best."""
    dense = [row for row in rows if row.method.startswith("dense")]
    base = min(dense, key=lambda row: row.seconds)
    head = ("", "first token", "to dense", "attention", "mask", "rest", "peak", "density", "tokens as dense")
    lines = [f"{head[0]:<24}" + "".join(f"{name:>13}" for name in head[1:-1]) + f"   {head[-1]}"]
    for row in rows:
        same = sum(left == right for left, right in zip(row.tokens, base.tokens, strict=True))
        cells = [f"{row.seconds:.3f} s", f"{base.seconds / row.seconds:.2f}x"]
        cells += ["-" if x is None else f"{x:.1f} ms" for x in (row.attention_ms, row.mask_ms, row.rest_ms)]
        cells += ["-" if row.peak_gb is None else f"{row.peak_gb:.1f} GB", "-" if row.density is None else f"{row.density:.3f}"]
        lines.append(f"{row.method:<24}" + "".join(f"{cell:>13}" for cell in cells) + f"   {same} of {len(row.tokens)}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder or name of a model that transformers can load")
    which.add_argument("--shape", choices=sorted(SHAPES), help="that model's shape, with random weights")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32768], help="lengths of the prompts")
    parser.add_argument("--text", help="a file whose beginning is the prompt; else seeded random tokens")
    parser.add_argument("--chunk", type=int, help="prefill in chunks of so many tokens")
    parser.add_argument("--gamma", type=float, default=0.95)
    parser.add_argument("--tau", type=float, default=0.1)
    parser.add_argument("--density", type=float, nargs="*", default=[], help="densities to force by random blocks")
    parser.add_argument("--dense-below", type=int, help="as in flexprefill_attention")
    parser.add_argument("--default-sdpa", action="store_true", help="also dense attention by the backend that torch chooses")
    parser.add_argument("--prefills", type=int, default=3, help="prefills to take the median of")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to generate and compare")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than the model has")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tensor-parallel", action="store_true", help="under torchrun, by transformers' tp_plan")
    parser.add_argument("--json", type=Path, help="file to add the rows to, one a line")
    options = parser.parse_args(arguments)
    if options.text and not options.model:
        parser.error("--text needs --model, whose tokenizer reads it")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, measure every way at every length, print the tables."""
    options = parse(arguments)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    transformers.utils.logging.disable_progress_bar()
    model = load(options)
    device = next(model.parameters()).device
    speaks, processes = (dist.get_rank() == 0, dist.get_world_size()) if dist.is_initialized() else (True, 1)
    if speaks:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
        named = options.model or f"{options.shape} (random weights)"
        layers, releases = model.config.num_hidden_layers, f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{named}, {layers} layers, {options.dtype}, on {processes} x {where}, {releases}\n")
    for tokens in options.prompt_tokens:
        ids = prompt_ids(options, tokens, model.config.vocab_size).to(device)
        rows = []
        for name, way in ways(model, options):
            with way() as run:
                rows.append(measure(model, ids, name, options))
            if isinstance(run, FlexPrefillRun) and not callable(run.settings.method):
                rows[-1].density = density_of(model, ids, options)
        if speaks:
            print(f"{tokens:,} tokens" + (f", in chunks of {options.chunk:,}" if options.chunk else ""))
            print(table(rows) + "\n", flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    named = {"model": options.model or options.shape, "layers": model.config.num_hidden_layers}
                    named["processes"] = processes
                    file.writelines(json.dumps({**named, **asdict(row)}) + "\n" for row in rows)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
