"""One engine in its own process, and all its questions: ``python -m tests.vllm.engine_run ENGINE [cuda] OUT``.

vLLM reads its environment at import, and an engine lives as long as its process.
"""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from tests.serving import programs
from tests.serving.programs import plan_one_token_off, prompt
from tests.vllm import random_models
from tests.vllm.engines import ENGINES, MODEL, MOST_TOKENS, PAGE, PAGES, on_cpu, on_cuda

# rows, between one page of a mixture and two
MIXTURE_CHUNK = 777
# tokens, of which attention takes no fewer bytes than a state
MIXTURE_PAGE = 544


def main(name: str, *device_and_out: str) -> None:
    *device, out = device_and_out
    engine = ENGINES[name]
    options = engine.options
    environment, given = on_cuda(options, engine.kernel) if device == ["cuda"] else on_cpu(options)
    os.environ.update(environment)
    if engine.ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    given |= {"distributed_executor_backend": "uni"} if engine.ranks == 1 else {"tensor_parallel_size": engine.ranks}
    if engine.model is not None:
        given |= {"model": engine.model(Path(out).with_suffix(".model")), "skip_tokenizer_init": True, "max_model_len": 2048}
    common = {"model": MODEL, "max_model_len": MOST_TOKENS, "seed": 0, "max_num_seqs": 8, "block_size": PAGE}
    common |= {
        "max_num_batched_tokens": 777 if engine.asks in ("in_777s", "with_scales") else MOST_TOKENS,
        "num_gpu_blocks_override": PAGES,
    }
    common |= {"additional_config": {} if options is None else {"flexmask": options}}
    asked = Asked(LLM(**{**common, **given, **engine.arguments}))
    answers = asked.counted(engine.asks) if isinstance(engine.asks, tuple) else getattr(asked, engine.asks)()
    results = {**answers, "backends": asked.backends(), "roles": asked.roles()}
    if engine.with_faults:
        results["faults"] = {name: asked.under(fault, "odd_chunks") for name, fault in faults()}
    # of this process
    results.setdefault("counters", asked.counts())
    Path(out).write_text(json.dumps(results), encoding="utf-8")


class Asked(programs.Asked):
    def __init__(self, llm):
        from vllm.exceptions import VLLMValidationError

        self.llm, self.refusal = llm, VLLMValidationError

    def counted(self, questions):
        """Answers, and how much the requests compiled and counted."""
        before = compilations()
        results = {name: self.ask(name) for name in questions}
        return {**results, "compiled_by_requests": compilations() - before, "counters": self.counts()}

    def in_777s(self):
        """For an engine with steps of 777 rows, which may be in another process."""
        self.budget = lambda rows: None
        return {name: self.ask(name) for name in ("odd_chunks", "mixed")}

    def with_scales(self):
        """With an FP8 cache whose scales are not 1."""
        for layer in self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
            layer._k_scale.fill_(0.06)
            layer._v_scale.fill_(0.03)
            layer._k_scale_float, layer._v_scale_float = 0.06, 0.03
        return self.in_777s()

    def of_random_model(self):
        tokens = random_models.prompt(1500)
        return self.whole_and_in_chunks([tokens, tokens[:700]], 1, 333)

    def of_latent_model(self):
        tokens = random_models.prompt(1500)
        prompts = [tokens, tokens[:40], tokens[:700], tokens[300:330], tokens[100:900]]
        chunk = latent_chunk(self.llm.llm_engine.vllm_config.device_config.device_type)
        return self.whole_and_in_chunks(prompts, 3, chunk, tokens=6)

    def whole_and_in_chunks(self, prompts, number, chunk, **options):
        """All prompts, and the first ones again."""
        whole = self.generate(prompts, **options)
        self.scheduler.scheduler_config.enable_chunked_prefill = True
        self.budget(chunk)
        return {"whole": whole, "odd_chunks": self.generate(prompts[:number], **options)}

    def of_mixture(self):
        """Chunks of two prompts and a short one, a prompt whose beginning may be cached, and chunks that read other pages."""
        tokens = random_models.prompt(1800)
        self.budget(MIXTURE_CHUNK)
        chunks = self.generate([tokens[:1700], tokens[:700], tokens[5:45]], tokens=6)
        longer = self.generate([tokens], tokens=6, scored=False)
        faults = {"second_page_twice": self.with_second_page_twice([tokens[:1700]], tokens=6)}
        pages = {
            layer.kv_cache.shape[2]
            for layer in self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
            if hasattr(layer, "impl")
        }
        return {"chunks": chunks, "longer": longer, "faults": faults, "page_sizes": sorted(pages)}

    def with_second_page_twice(self, *arguments, **options):
        """A fault: later chunks read the second page in the place of the first too."""
        import torch

        from flexmask.integrations.vllm import builder

        right = builder.PageTable
        with patch.object(builder, "PageTable", lambda table, tokens: right(torch.cat([table[1:2], table[1:]]), tokens)):
            return self.generate(*arguments, **options)

    def budget(self, tokens):
        """Most rows of a step, which vLLM reads in every step."""
        self.scheduler.max_num_scheduled_tokens = tokens

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def backends(self):
        """Attention backends of the engine's layers, by full name."""
        layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        return sorted({each.get_attn_backend().full_cls_name()[1] for each in layers if hasattr(each, "get_attn_backend")})

    @property
    def engine(self):
        from flexmask.integrations.vllm.engine import engine_of

        return engine_of(self.llm.llm_engine.vllm_config)

    def counts(self):
        found = self.engine.counters
        return {"sparse": found.sparse_tokens, "dense": found.dense_tokens, "steps": found.steps, "density": found.density}

    def roles(self):
        """By layer: window, sinks and soft cap where it is sparse, else the reason."""

        def told(role):
            return role if isinstance(role, str) else {"window": role.window, "sinks": role.has_sinks, "softcap": role.softcap}

        return {name: told(role) for name, role in self.engine.roles.items()}

    def generate(self, prompts, tokens=4, chosen=None, scored=True):
        given = [
            sampling(tokens, prompt_logprobs=0 if scored else None, extra_args=each) for each in chosen or [None] * len(prompts)
        ]
        return [answer(each) for each in self.llm.generate([{"prompt_token_ids": p} for p in prompts], given, use_tqdm=False)]

    def empty_cache(self):
        self.budget(MOST_TOKENS)
        self.llm.reset_prefix_cache()

    def preempted(self):
        """Two requests that do not fit together: one is preempted."""
        self.empty_cache()
        preempt = self.scheduler._preempt_request
        with patch.object(self.scheduler, "_preempt_request", side_effect=preempt) as counting:
            answers = self.generate([prompt(4150, seed=7), prompt(4150, seed=8)], tokens=90, scored=False)
        return [*answers, {"preemptions": counting.call_count}]

    def aborted(self):
        """A request is dropped between its chunks; its neighbour goes on."""
        self.budget(700)
        engine = self.llm.llm_engine
        for name, length in (("dropped", 4000), ("kept", 2900)):
            engine.add_request(name, {"prompt_token_ids": prompt(length, seed=length)}, sampling(4))
        for _ in range(3):
            engine.step()
        engine.abort_request(["dropped"])
        finished = []
        while engine.has_unfinished_requests():
            finished += [each for each in engine.step() if each.finished]
        return [answer(each) for each in finished if each.request_id.startswith("kept")]

    def under(self, fault, name):
        with fault:
            return self.ask(name)


def faults():
    """Patches: a later chunk reads another request's page, or misses the last cached token."""
    from flexmask.integrations.vllm import pages

    right = pages.PageTable.__init__

    def wrong(page_table, table, tokens):
        table = table.clone()
        table[3] = table[20] if tokens > 700 else table[3]
        right(page_table, table, tokens)

    yield "another_page", patch.object(pages.PageTable, "__init__", wrong)
    yield "offset_off_by_one", patch("flexmask.integrations.serving.engine.plan_step", plan_one_token_off)


def latent_chunk(device):
    """Rows of a chunk: on a GPU more than the 512 that FLASH_ATTN_MLA decodes."""
    return 333 if device == "cpu" else 605


def sampling(tokens, **options):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=8, ignore_eos=True, detokenize=False, **options)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
