"""Workload certificates: the fastest configuration whose expected loss over a workload is shown to be below alpha.

Learn then test (Angelopoulos, Bates, Candes, Jordan & Lei 2021): an ordered grid of configurations is fixed beforehand,
each is measured on the same held-out requests, and fixed-sequence testing walks the grid from the safest on. A
statement about requests drawn as these were; a record speaks of one request.
"""

from __future__ import annotations
