"""The entry point ``vllm.general_plugins: flexmask``: it registers names, and reads the options of requests."""

from __future__ import annotations

import logging
import os

from flexmask.integrations.vllm.engine import CPU_VARIABLE
from flexmask.integrations.vllm.requests import read_requests

_BACKENDS = "flexmask.integrations.vllm.backends"
_log = logging.getLogger("vllm.flexmask")


def register() -> None:
    """Register sparse prefill as ``--attention-backend CUSTOM``; vLLM calls this in each of its processes.

    FLEXMASK_VLLM_CPU=1 overrides the CPU backends, where vLLM ignores the choice. Releases are checked when the backend is first
    used; without it, options of requests are ignored as any other of their extra arguments.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    path = f"{_BACKENDS}.Custom"
    if custom.is_overridden() and custom.get_path() != path:
        _log.warning("flexmask: attention backend CUSTOM is taken by %s and stays so", custom.get_path())
    else:
        register_backend(custom, path)
    if os.environ.get(CPU_VARIABLE) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_BACKENDS}.SparseCPUAttention")
        # since 0.27
        if "CPU_MLA" in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum.CPU_MLA, f"{_BACKENDS}.SparseCPULatentAttention")
    read_requests()
