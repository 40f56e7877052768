"""A vLLM engine with several requests at a time: throughput, and first tokens while others decode."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from typing import Any

from bench.serving.prompts import prompts
from bench.serving.vllm_engine import counted, generate


def throughput(llm: Any, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Several prompts at a time with the tokens after them, as ``vllm bench serve`` says of requests that come at once."""
    seconds, outputs = generate(llm, prompts(options, tokens, options.at_once), options.new_tokens)
    total = options.at_once * (tokens + options.new_tokens)
    times = [each.metrics for each in outputs]
    row = {"prompt_tokens": tokens, "at_once": options.at_once, "new_tokens": options.new_tokens, "seconds": seconds}
    row |= {"tokens_per_second": total / seconds, "first_token_seconds": [each.first_token_latency for each in times]}
    after = [(each.last_token_ts - each.first_token_ts) / max(each.num_generation_tokens - 1, 1) for each in times]
    return {**row, "seconds_a_token_after": after}


def under_load(llm: Any, options: argparse.Namespace, tokens: int, chunk: int, number: int = 12) -> dict[str, Any]:
    """`number` prompts arrive at random while others decode: seconds to their first tokens, and between tokens of the others."""
    from vllm import SamplingParams

    engine, counters = llm.llm_engine, counted(llm, options)
    engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = chunk
    how = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    decoding = [f"decodes {index}" for index in range(options.at_once)]
    for name, ids in zip(decoding, prompts(options, 1024, options.at_once), strict=True):
        given = SamplingParams(max_tokens=max(options.prompt_tokens) - 1024, **how)
        engine.add_request(name, {"prompt_token_ids": ids}, given)
    draw, asked = random.Random(0), prompts(options, tokens, number)
    arrivals = list(itertools.accumulate(draw.expovariate(options.rate) for _ in asked))
    gaps: list[float] = []
    waits: dict[str, float] = {}
    done, arrived, start, before = 0, 0, time.perf_counter(), 0.0
    while done < number:
        while arrived < number and arrivals[arrived] <= time.perf_counter() - start:
            given = SamplingParams(max_tokens=options.new_tokens, **how)
            engine.add_request(str(arrived), {"prompt_token_ids": asked[arrived]}, given)
            arrived += 1
        outputs = engine.step()
        now = time.perf_counter()
        if any(each.request_id in decoding for each in outputs):
            if before:  # not the first tokens of all
                gaps.append(now - before)
            before = now
        for each in (each for each in outputs if each.request_id not in decoding):
            waits.setdefault(each.request_id, now - start - arrivals[int(each.request_id)])
            done += each.finished
    engine.abort_request(decoding)
    parts = statistics.quantiles(gaps, n=100, method="inclusive")
    row = {"prompt_tokens": tokens, "chunk": chunk, "rate": options.rate, "decoding": options.at_once, "seconds": now - start}
    row |= {"first_token_seconds": list(waits.values()), "density": counters.density if counters else None}
    return row | {"gap_p50": parts[49], "gap_p95": parts[94], "gap_p99": parts[98], "gap_most": max(gaps)}
