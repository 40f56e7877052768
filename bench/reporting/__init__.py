"""From rows of results to tables, pictures and sections of the report; needs no GPU."""
