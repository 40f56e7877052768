"""Reports: ``python -m bench.report`` reads the rows of ``bench/results`` and writes tables and figures of the documents."""
