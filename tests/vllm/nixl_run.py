"""Servers that prefill and a stock one that decodes from their pages: ``python -m tests.vllm.nixl_run [cuda] OUT``.

Each has its own processes, and vLLM's `NixlConnector` moves the pages; with ``cuda`` the decoding one has the second GPU.
"""

import json
import os
import socket
import sys
from pathlib import Path
from unittest.mock import patch

from flexmask.integrations.vllm import registration
from tests.serving.programs import FAULT, prompt, split_one_token_off
from tests.vllm.engine_run import answer, sampling
from tests.vllm.engines import CPU_PLUGIN, MODEL, PAGE, PAGES, SPARSE, on_cpu, on_cuda

# vLLM's processes import this module, under another name
if os.environ.get(FAULT):
    patch("flexmask.integrations.serving.engine.split_step", split_one_token_off).start()


def server(device, role, options=None):
    """Start an engine; without options on the stock backend."""
    from vllm import LLM

    if device == "cuda":
        environment, given = on_cuda(options, "FLASH_ATTN")
        environment = {**environment, "CUDA_VISIBLE_DEVICES": "0" if options else "1"}
    else:
        environment, given = on_cpu(options)
    # where its connector listens
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(environment, VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(port))
    return LLM(
        model=MODEL,
        max_model_len=4096,
        max_num_batched_tokens=777,
        max_num_seqs=8,
        block_size=PAGE,
        num_gpu_blocks_override=PAGES,
        seed=0,
        # each answer comes from pages that were handed over, or is prefilled anew
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": device,
            # the connector compares the names of backends: CUSTOM and FLASH_ATTN have one layout of pages
            "kv_connector_extra_config": {"enforce_handshake_compat": False},
        },
        additional_config={} if options is None else {"flexmask": options},
        **given,
    )


def generate(engine, ids, tokens, **extra):
    return engine.generate({"prompt_token_ids": ids}, sampling(tokens, extra_args=extra), use_tqdm=False)[0]


def main(*device_and_out):
    *named, out = device_and_out
    device = named[0] if named else "cpu"
    prompts = [prompt(3001), prompt(1700, seed=1)]
    decodes = server(device, "kv_consumer")
    if device == "cpu":
        sys.path.insert(0, CPU_PLUGIN)
        # this process is the front end of all; vLLM does not choose our backend by its name on CPUs
        registration.is_ours = lambda vllm_config: "flexmask" in vllm_config.additional_config
    prefills = server(device, "kv_producer", SPARSE)
    os.environ[FAULT] = "1"
    wrong = server(device, "kv_producer", SPARSE)

    def handed(first, **options):
        """Answers of the decoding server, from pages of `first`."""
        asked = {**options, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        taken = [generate(first, ids, 1, **asked).kv_transfer_params for ids in prompts]
        both = zip(prompts, taken, strict=True)
        return [answer(generate(decodes, ids, 4, kv_transfer_params=params)) for ids, params in both]

    results = {
        "stock": [answer(generate(decodes, ids, 4)) for ids in prompts],
        "prefills": [answer(generate(prefills, ids, 4)) for ids in prompts],
        "handed": handed(prefills),
        "handed_at_one": handed(prefills, flexmask_gamma=1),
        "handed_wrong": handed(wrong),
    }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
