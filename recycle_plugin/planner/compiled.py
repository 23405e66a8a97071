"""How the planner's loops are compiled: by numba, on the first call on a machine; cached on disk.  ``planner.warm`` does it ahead of a failure."""

from __future__ import annotations

from numba import njit

compiled = njit(cache=True, nogil=True)
inner = njit(cache=True, nogil=True, _nrt=False)
"""For what is called from compiled loops: counts no references to the arrays in its arguments, which for tuples of
arrays takes more time than the work itself (greedy: 2.5 times as long).  Hence it can't make or return arrays."""
