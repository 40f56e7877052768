"""Short calls of `tune` for tests."""

import flexmask.integrations.huggingface as flexmask_hf

GAMMAS = (0.2, 0.5, 0.8, 1.0)
OPTIONS = {"gammas": GAMMAS, "block_size": 16, "min_budget": 0, "progress": False}


def tuned(model, tokens, **options):
    options = {**OPTIONS, **({} if "error" in options else {"density": 0.6}), **options}
    return flexmask_hf.tune(model, tokens, **options)
