"""One engine in its own process, and all its questions: ``python -m tests.vllm.engine_run ENGINE [cuda] OUT``.

vLLM reads its environment at import, and an engine lives as long as its process.
"""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from tests.serving import programs
from tests.serving.programs import FAULT, QUESTIONS, prompt, split_one_token_off
from tests.vllm import random_models
from tests.vllm.engines import CPU_PLUGIN, ENGINES, LATENT, LATENT_ON_CUDA, MAX_TOKENS, MODEL, PAGE, PAGES, on_cpu, on_cuda

# vLLM's processes import this module, under another name
if os.environ.get(FAULT):
    patch("flexmask.integrations.serving.engine.split_step", split_one_token_off).start()


def main(name: str, *device_and_out: str) -> None:
    *device, out = device_and_out
    engine = ENGINES[name]
    options = engine.options
    environment, given = on_cuda(options, engine.kernel) if device == ["cuda"] else on_cpu(options, engine.questions is LATENT)
    os.environ.update(environment)
    if "PYTHONPATH" in environment:
        sys.path.insert(0, CPU_PLUGIN)
    if engine.ranks == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torch._dynamo.utils import counters
    from vllm import LLM

    given |= {"distributed_executor_backend": "uni"} if engine.ranks == 1 else {"tensor_parallel_size": engine.ranks}
    if engine.model is not None:
        given |= {"model": engine.model(Path(out).with_suffix(".model")), "skip_tokenizer_init": True, "max_model_len": 2048}
    common = {"model": MODEL, "max_model_len": MAX_TOKENS, "seed": 0, "max_num_seqs": 8, "block_size": PAGE}
    common |= {"max_num_batched_tokens": engine.rows, "num_gpu_blocks_override": PAGES}
    common |= {"additional_config": {} if options is None else {"flexmask": options}}
    if engine.pages is not None:
        where = {"shared_storage_path": str(Path(out).with_name(engine.pages))}
        given["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": where,
        }  # fmt: skip
    if engine.is_wrong:
        os.environ[FAULT] = "1"
    asked = Asked(LLM(**{**common, **given, **engine.arguments}), engine, device, Path(out).with_suffix(".adapters"))
    before = counters["stats"]["unique_graphs"]
    results = {each: asked.ask(each) for each in engine.asks}
    # these are of this process alone
    results |= {"compiled_by_requests": counters["stats"]["unique_graphs"] - before, "counters": asked.counts()}
    results |= {"backends": asked.backends(), "roles": asked.roles(), "page_sizes": asked.page_sizes()}
    results["faults"] = {
        each: asked.under(fault, engine.asks) for each, fault in faults(asked.page_sizes()) if each in engine.faults
    }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


class Asked(programs.Asked):
    def __init__(self, llm, engine, device, folder):
        from vllm.exceptions import VLLMValidationError

        self.llm, self.refusal, self.folder = llm, VLLMValidationError, folder
        self.has_budget = engine.ranks == 1 and engine.rows == MAX_TOKENS
        self.layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        self.questions = LATENT_ON_CUDA if engine.questions is LATENT and device == ["cuda"] else engine.questions
        if engine.questions is not QUESTIONS:
            self.prompt = random_models.prompt
        if engine.arguments.get("kv_cache_dtype") == "fp8":
            # with scales of 1 a missing scale would not show
            for layer in self.layers:
                layer._k_scale.fill_(0.06)
                layer._v_scale.fill_(0.03)
                layer._k_scale_float, layer._v_scale_float = 0.06, 0.03

    def longer(self):
        """A prompt whose beginning may be cached."""
        return self.generate([random_models.prompt(0, 1800)], tokens=6, scored=False)

    def budget(self, tokens):
        """Most rows of a step, which vLLM reads in every step; another process's stay."""
        if self.has_budget:
            self.scheduler.max_num_scheduled_tokens = tokens
            # vLLM turns it off for latent attention on CPUs
            self.scheduler.scheduler_config.enable_chunked_prefill = True

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def backends(self):
        """Attention backends of the engine's layers, by full name."""
        return sorted({each.get_attn_backend().full_cls_name()[1] for each in self.layers if hasattr(each, "get_attn_backend")})

    def page_sizes(self):
        caches = [layer.kv_cache for layer in self.layers if hasattr(layer, "impl")]
        return sorted({cache.shape[2] for cache in caches if cache.ndim == 4})

    @property
    def engine(self):
        from flexmask.integrations.vllm.engine import engine_of

        return engine_of(self.llm.llm_engine.vllm_config)

    def counts(self):
        found = self.engine.counters
        return {"sparse": found.sparse_tokens, "dense": found.dense_tokens, "steps": found.sparse_steps, "density": found.density}

    def roles(self):
        """By layer: window, sinks and soft cap where it is sparse, else the reason."""
        from flexmask.integrations.serving.layers import Stock

        def told(role):
            if isinstance(role, Stock):
                return role.reason
            return {"window": role.window, "sinks": role.has_sinks, "softcap": role.softcap}

        return {name: told(role) for name, role in self.engine.roles.items()}

    def generate(self, prompts, tokens=4, chosen=None, scored=True, adapters=None, regex=None):
        from vllm.sampling_params import StructuredOutputsParams

        options = {"prompt_logprobs": 0 if scored else None}
        if regex:
            options["structured_outputs"] = StructuredOutputsParams(regex=regex)
        given = [sampling(tokens, extra_args=each, **options) for each in chosen or [None] * len(prompts)]
        asked = [each if isinstance(each, dict) else {"prompt_token_ids": each} for each in prompts]
        return [answer(each) for each in self.llm.generate(asked, given, use_tqdm=False, lora_request=adapters)]

    def guesses(self):
        """Tokens that were guessed so far, and those of them that were right."""
        counts = {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}
        return [counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")]

    def adapters(self):
        """One prompt for the model and two adapters, side by side, at the server's gamma and at gamma 1."""
        from vllm.lora.request import LoRARequest

        self.empty_cache()
        beside = [None, *(LoRARequest(str(seed), seed, random_models.adapter(self.folder, seed)) for seed in (1, 2))]
        prompts = [prompt(1700, seed=1)] * len(beside)
        # vLLM's operators for CPUs do not score prompts beside adapters
        options = {"scored": False, "adapters": beside}
        both = [self.generate(prompts, chosen=[each] * len(beside), **options) for each in (None, {"flexmask_gamma": 1})]
        return [*both[0], *both[1]]

    def pictured(self):
        """A picture inside of a long text, at the server's gamma and at gamma 1; and another picture at gamma 1."""
        from PIL import Image

        text = prompt(1700)
        text = [*text[:900], random_models.PICTURE, *text[900:]]
        seen = [Image.radial_gradient("L").convert("RGB"), Image.new("RGB", (56, 56))]
        asked = [{"prompt_token_ids": text, "multi_modal_data": {"image": each}} for each in (seen[0], *seen)]
        return self.generate(asked, chosen=[None, *[{"flexmask_gamma": 1}] * 2])

    def alone(self):
        return self.generate([prompt(1700, seed=1)])

    def handed(self):
        """Whole prompts, whose pages another server may have."""
        return self.generate([prompt(3001), prompt(1700, seed=1)], scored=False)

    def empty_cache(self):
        self.budget(MAX_TOKENS)
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

    def under(self, fault, names):
        with fault:
            return self.ask("odd_chunks" if "odd_chunks" in names else "chunks")


def faults(page_sizes):
    """Patches: a later chunk reads another request's page, misses the last cached token, or reads its second page twice."""
    import torch

    from flexmask.integrations.vllm import builder, pages

    table_of, right = builder.PageTable, pages.PageTable.__init__

    def wrong(page_table, table, tokens):
        table = table.clone()
        table[3] = table[20] if tokens > 700 else table[3]
        right(page_table, table, tokens)

    yield "another_page", patch.object(pages.PageTable, "__init__", wrong)

    def twice(table, tokens):
        # a request of one page has no second one: that entry may be a page with states of other layers
        return table_of(torch.cat([table[1:2], table[1:]]) if tokens > max(page_sizes) else table, tokens)

    yield "second_page_twice", patch.object(builder, "PageTable", twice)
    yield "offset_off_by_one", patch("flexmask.integrations.serving.engine.split_step", split_one_token_off)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
