"""Bounds of the differences of `agreement`, from rounding: between two stock engines, and between the adapter in two dtypes."""

# for each comparison, one of stock engines that differ by rounding alone
VLLM = {
    "keep_all and stock": "stock in other chunks",
    "graphs and stock": "stock in other chunks",
    "triton and triton_stock": "triton_stock and stock",
    **{f"{name} and {name}_stock": f"{name}_stock in other chunks" for name in ("windows", "sinks", "both", "latent")},
    "latent_triton and latent_triton_stock": "latent_triton_stock in other chunks",
    "keep_all_on_two and stock_on_two": "stock_on_two and stock",
    "fp8 and stock": "fp8_stock and stock",
    "fp8_later and fp8_stock": "fp8_stock and stock",
}
SGLANG = dict.fromkeys(("keep_all and stock", "triton and triton_stock"), "triton_stock and stock")
FAULTS = {
    **{f"planted fault {name} and stock": "stock in other chunks" for name in ("another_page", "offset_off_by_one")},
    **{f"planted fault_{name} and stock": "triton_stock and stock" for name in ("slots", "rows")},
}
# factors of the mean and 99th percentile of such a comparison, and of its largest difference
_ROUNDING, _FAULT = 2, 4
# factor of the adapter's own differences: each of two engines in bfloat16 moves as many blocks across a threshold
_MASKS = 2


def beyond(row, rows, rounding, masks):
    """Give the reason if a row is not explained; None if it is, or if it only gives the scale of others.

    `rounding` is `VLLM` or `SGLANG`; `masks` are rows of the adapter in bfloat16 and float32.
    """
    compared, asked = row["compared"], row["asked"]
    ours, _, theirs = compared.partition(" and ")
    if compared in FAULTS:
        least = _FAULT * _most("most", _of(FAULTS[compared], asked, rows))
        return None if row["most"] > least else f"a fault differs by {row['most']:.3f}, not by more than {least:.3f}"
    if compared in rounding:
        same = _of(rounding[compared], asked, rows)
        most = {name: _ROUNDING * _most(name, same) for name in ("mean", "p99")}
        others = max(each["tokens"] - each["tokens_alike"] for each in same)
        if row["tokens"] - row["tokens_alike"] > others:
            return f"{row['tokens'] - row['tokens_alike']} tokens differ, of two stock engines {others}"
        return next((f"{name} {row[name]:.3f} > {most[name]:.3f}" for name in most if row[name] > most[name]), None)
    if theirs in ("adapter", "by_head"):
        engine = "by_head" if theirs == "by_head" else ours.removeprefix("graphs_").replace("_triton", "")
        own = _of(f"adapter in bfloat16 and float32, {engine}", asked, masks)[0]
        if row["mean"] > _MASKS * own["mean"]:
            return f"mean {row['mean']:.3f} > {_MASKS * own['mean']:.3f}"
        dense = [each for each in rows if each["compared"] in (f"{ours} and stock", f"{ours} and latent_stock")]
        if any(2 * row["mean"] > each["mean"] for each in dense if each["asked"] == asked):
            return f"mean {row['mean']:.3f}, near to dense attention too"
        return None if row["tokens_alike"] == row["tokens"] or theirs == "by_head" else "another token"
    return None


def _of(compared, asked, rows):
    """The rows of a comparison: those of the same question, if there are."""
    found = [each for each in rows if each["compared"] == compared]
    assert found, f"no row of {compared!r}"
    return [each for each in found if each["asked"] == asked] or found


def _most(name, rows):
    return max(each[name] for each in rows)
