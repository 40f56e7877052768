"""Tables and figures of the reports, from the rows of ``bench/results``."""

# of a chart: Okabe and Ito's colours from dark to light, each with a marker and a dash
LINES: tuple[tuple[str, str, str], ...] = (
    ("#000000", "o", "-"),
    ("#0072b2", "s", "--"),
    ("#d55e00", "^", "-."),
    ("#009e73", "D", ":"),
    ("#cc79a7", "v", "-"),
    ("#e69f00", "P", "--"),
    ("#56b4e9", "X", "-."),
)
