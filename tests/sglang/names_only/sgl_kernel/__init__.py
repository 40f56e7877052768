"""Names of SGLang's kernels, which its path for CPUs imports and does not call; a called one raises.

The registry has no build of ``sglang-kernel`` for CPUs.
"""


def __getattr__(name):
    if name.startswith(("__", "pytest")):  # pytest collects modules for their examples
        raise AttributeError(name)

    def absent(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name}: only its name is here")

    return absent
