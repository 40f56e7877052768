"""The entry point ``sglang.srt.plugins: flexmask``: it registers the name of a backend, and reads the options of requests."""

from __future__ import annotations

from flexmask.integrations.sglang.options import NAME
from flexmask.integrations.sglang.requests import read_requests


def register() -> None:
    """Make ``--prefill-attention-backend flexmask`` choose sparse prefill; SGLang calls this in each of its processes.

    Releases are checked when the backend is made: without it, any SGLang starts as ever.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from flexmask.integrations.sglang.backend import make_backend

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(make_backend)
    read_requests()
