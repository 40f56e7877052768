"""Tables and figures of the reports, from the rows of ``bench/results``."""
