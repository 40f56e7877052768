"""One engine in a process of its own, and everything that is asked of it: ``python -m tests.vllm.engine_run ENGINE [cuda] OUT``.

vLLM reads its environment when it is imported, and an engine does not go away as long as its process lives. So a test starts
this program for each engine that it needs and compares what they write.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

MODEL = "bench/retriever/model"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # else a core is set aside
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
ON_CUDA = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # a package that the engine does not need
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
MOST_TOKENS, PAGE = 8192, 32
# tokens of all requests at a time: two of those that `preempted` asks for do not fit to their end
PAGES = 264
KEEP_ALL = {"gamma": 1.0, "block_size": 64, "dense_below": 0}
SPARSE = {"gamma": 0.9, "block_size": 64, "min_budget": 128, "dense_below": 0}
BY_HEAD = {**SPARSE, "gamma": [0.6, 0.98, 0.7, 0.9, 0.95, 0.6, 1.0, 0.8]}
ENGINES = {"stock": None, "keep_all": KEEP_ALL, "sparse": SPARSE, "by_head": BY_HEAD, "two_ranks": BY_HEAD}
# by Inductor, which makes the memory-measuring run come before the builder
ENGINES["compiled"] = KEEP_ALL
# the same two over two GPUs, in chunks of 777
ENGINES |= {"stock_on_two": None, "keep_all_on_two": KEEP_ALL}
ON_TWO = ("two_ranks", "stock_on_two", "keep_all_on_two")
# Gemma 2 with random weights: every other layer has a sliding window, all have a soft cap
ENGINES |= {"windows_stock": None, "windows": KEEP_ALL}


def on_cpu(name, options):
    """Environment and arguments of an engine on a CPU: in float32, eager, the plug-in put in by an environment variable."""
    environment = ENVIRONMENT if options is None else {**ENVIRONMENT, "FLEXMASK_VLLM_CPU": "1"}
    return environment, {"dtype": "float32", "enforce_eager": name != "compiled"}


def on_cuda(options):
    """The same on a GPU: in bfloat16, compiled and with CUDA graphs, the plug-in chosen by name, so that several engines fit."""
    backend = "FLASH_ATTN" if options is None else "CUSTOM"
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
    return ON_CUDA, {"dtype": "bfloat16", "attention_backend": backend, **memory}


def main(name: str, *device_and_out: str) -> None:
    *device, out = device_and_out
    options = ENGINES[name]
    environment, given = on_cuda(options) if device == ["cuda"] else on_cpu(name, options)
    os.environ.update(environment)
    if name not in ON_TWO:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    windows = name.startswith("windows")
    llm = LLM(
        random_gemma(Path(out).with_suffix(".model")) if windows else MODEL,
        skip_tokenizer_init=windows,
        **given,
        seed=0,
        max_model_len=2048 if windows else MOST_TOKENS,
        max_num_batched_tokens=777 if name.endswith("_on_two") else MOST_TOKENS,
        max_num_seqs=8,
        block_size=PAGE,
        num_gpu_blocks_override=PAGES,
        additional_config={} if options is None else {"flexmask": options},
        **({"tensor_parallel_size": 2} if name in ON_TWO else {"distributed_executor_backend": "uni"}),
    )
    asked = Asked(llm)
    if windows:
        results = asked.with_windows()
    elif name.endswith("_on_two"):
        results = asked.on_two()
    elif name in ("by_head", "two_ranks"):
        results = asked.by_head()
    else:
        results = asked.all(faults=name == "keep_all")
    results["backends"] = asked.backends()
    Path(out).write_text(json.dumps(results), encoding="utf-8")


class Asked:
    """The questions, each with its answers in types that JSON has."""

    def __init__(self, llm):
        self.llm = llm

    def all(self, faults):
        compiled = compilations()
        results = {
            name: getattr(self, name)()
            for name in ("whole", "chunks", "rechunked", "odd_chunks", "mixed", "short", "prefix_hits", "preempted", "aborted")
        }
        results["compiled_by_requests"] = compilations() - compiled
        results["counters"] = counted()
        if faults:
            results["faults"] = {"another_page": self.with_another_page(), "offset_off_by_one": self.with_offset_off_by_one()}
        return results

    def by_head(self):
        return {"whole": self.whole()}

    def on_two(self):
        """As `odd_chunks` and `mixed`, where the scheduler is another process's."""
        mixed = [prompt(length, seed=length) for length in (40, 90, 2500, 1300, 200)]
        answers = {"odd_chunks": self.generate([prompt(3000, seed=3)], prompt_logprobs=0)}
        return {**answers, "mixed": self.generate(mixed, tokens=12, prompt_logprobs=0)}

    def with_windows(self):
        import random

        drawn = random.Random(0)
        tokens = [drawn.randrange(4, 500) for _ in range(1500)]
        whole = self.generate([tokens, tokens[:700]], prompt_logprobs=0, detokenize=False)
        self.budget(333)
        return {"whole": whole, "odd_chunks": self.generate([tokens], prompt_logprobs=0, detokenize=False)}

    def budget(self, tokens):
        """Rows of a step at most, which vLLM reads anew in every step."""
        self.scheduler.max_num_scheduled_tokens = tokens

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def backends(self):
        """The attention backends of the engine's layers in this process, by full name."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        return sorted({each.get_attn_backend().full_cls_name()[1] for each in layers if hasattr(each, "get_attn_backend")})

    def generate(self, prompts, tokens=4, **options):
        from vllm import SamplingParams

        given = SamplingParams(temperature=0, max_tokens=tokens, logprobs=8, ignore_eos=True, **options)
        return [answer(each) for each in self.llm.generate([{"prompt_token_ids": p} for p in prompts], given, use_tqdm=False)]

    def whole(self):
        """Two whole prompts in one step."""
        return self.generate([prompt(3001), prompt(1700, seed=1)], prompt_logprobs=0)

    def chunks(self):
        self.budget(2048)
        return self.generate([prompt(5000, seed=2)], prompt_logprobs=0)

    def rechunked(self):
        """The prompt of `chunks` in other ones: how far two runs of one engine are apart by rounding alone."""
        self.budget(1024)
        return self.generate([prompt(5000, seed=2)], prompt_logprobs=0)

    def odd_chunks(self):
        self.budget(777)
        return self.generate([prompt(3000, seed=3)], prompt_logprobs=0)

    def mixed(self):
        """Short prompts are decoded while long ones are still prefilled, and several of these share a step."""
        self.budget(1000)
        return self.generate([prompt(length, seed=length) for length in (40, 90, 2500, 1300, 200)], tokens=12, prompt_logprobs=0)

    def short(self):
        """Chunks that do not fill a block."""
        self.budget(50)
        return self.generate([prompt(230, seed=4)], prompt_logprobs=0)

    def prefix_hits(self):
        """The same prompt again, and one with the same beginning; before that the cache is emptied."""
        self.budget(MOST_TOKENS)
        self.llm.reset_prefix_cache()
        long, other = prompt(3000, seed=5), prompt(3300, seed=6)
        return [*self.generate([long]), *self.generate([long]), *self.generate([long[:2000] + other[2000:]])]

    def preempted(self):
        """Two requests that do not fit together to their end: one is thrown out, and prefilled again with what it generated."""
        self.budget(MOST_TOKENS)
        self.llm.reset_prefix_cache()
        scheduler, preempt, thrown_out = self.scheduler, self.scheduler._preempt_request, []

        def counting(request, *arguments, **options):
            thrown_out.append(request.request_id)
            return preempt(request, *arguments, **options)

        scheduler._preempt_request = counting
        try:
            answers = self.generate([prompt(4150, seed=7), prompt(4150, seed=8)], tokens=90)
        finally:
            scheduler._preempt_request = preempt
        return [*answers, {"preemptions": len(thrown_out)}]

    def aborted(self):
        """A request is dropped between its chunks; its neighbour goes on in pages that it leaves."""
        from vllm import SamplingParams

        self.budget(700)
        engine = self.llm.llm_engine
        given = SamplingParams(temperature=0, max_tokens=4, logprobs=8, ignore_eos=True)
        for name, length in (("dropped", 4000), ("kept", 2900)):
            engine.add_request(name, {"prompt_token_ids": prompt(length, seed=length)}, given)
        for _ in range(3):
            engine.step()
        engine.abort_request(["dropped"])
        finished = []
        while engine.has_unfinished_requests():
            finished += [each for each in engine.step() if each.finished]
        return [answer(each) for each in finished if each.request_id.startswith("kept")]

    def with_another_page(self):
        """A fault: a later chunk reads one page that another request wrote."""
        from flexmask.integrations.vllm import pages

        right = pages.Places.__init__

        def wrong(places, table, tokens):
            table = table.clone()
            table[3] = table[20] if tokens > 700 else table[3]
            right(places, table, tokens)

        pages.Places.__init__ = wrong
        try:
            return self.odd_chunks()
        finally:
            pages.Places.__init__ = right

    def with_offset_off_by_one(self):
        """A fault: a later chunk is believed to stand one token earlier than it does."""
        from flexmask.integrations.vllm import builder

        right = builder.plan_step

        def wrong(starts, lengths, *rest):
            chunks = zip(starts, starts[1:], lengths, strict=False)
            return right(starts, [tokens - (tokens > stop - start) for start, stop, tokens in chunks], *rest)

        builder.plan_step = wrong
        try:
            return self.odd_chunks()
        finally:
            builder.plan_step = right


def random_gemma(folder):
    """The folder of a small Gemma 2 whose weights are large enough for its soft cap to matter."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 2}
    scores = {"sliding_window": 200, "attn_logit_softcapping": 5.0, "max_position_embeddings": MOST_TOKENS}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**shape, **heads, **scores, initializer_range=0.2))
    model.save_pretrained(folder)
    return str(folder)


def prompt(length, seed=0):
    from bench.retriever.task import make_prompt

    return make_prompt(length, num_needles=max(1, min(8, length // 40)), seed=seed).token_ids.tolist()


def answer(output):
    made = output.outputs[0]
    likely = [{str(token): each.logprob for token, each in step.items()} for step in made.logprobs]
    given = output.prompt_logprobs or [None]
    return {
        "tokens": list(made.token_ids),
        "logprobs": likely,
        "prompt_logprobs": [each[token].logprob for token, each in zip(output.prompt_token_ids[1:], given[1:], strict=False)],
        "cached": output.num_cached_tokens,
    }


def compilations():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def counted():
    from flexmask.integrations.vllm.counters import COUNTERS

    density = COUNTERS.density
    return {"sparse": COUNTERS.sparse_tokens, "dense": COUNTERS.dense_tokens, "steps": COUNTERS.steps, "density": density}


if __name__ == "__main__":
    main(*sys.argv[1:])
