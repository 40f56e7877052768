"""The entry point ``vllm.general_plugins: flexmask``, which registers names only."""

from __future__ import annotations

import logging
import os

CPU_VARIABLE = "FLEXMASK_VLLM_CPU"
_BACKENDS = "flexmask.integrations.vllm.backends"
_log = logging.getLogger("vllm.flexmask")


def register() -> None:
    """Register sparse prefill as ``--attention-backend CUSTOM``; vLLM calls this in each of its processes.

    FLEXMASK_VLLM_CPU=1 overrides the CPU backends, where vLLM ignores the choice. Releases are checked when the backend is first
    used.
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
