"""The report of an inspection: pictures, a page and the numbers."""
