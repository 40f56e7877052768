"""Names of SGLang's kernels without the kernels: SGLang's own path for CPUs imports them and, on this kind of CPU, calls none.

There is no build of ``sglang-kernel`` for CPUs on the registry. A kernel that is called after all raises.
"""


def __getattr__(name):
    if name.startswith(("__", "pytest")):  # pytest collects modules for their examples
        raise AttributeError(name)

    def absent(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name}: only its name is here")

    return absent
