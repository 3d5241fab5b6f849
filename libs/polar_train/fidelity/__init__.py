"""`polar fidelity`: are the log-probs in the traces those of the weights that are said to have sampled them?

`source.py` reads published traces, `policies.py` finds each version's weights, `recompute.py` runs them (the only
module that needs torch), `check.py` puts these together, `tally.py` adds up. `native.py` measures something else on
the same traces: how often a plain engine would have shown the model other prompt ids.
"""

from .check import Options, check
from .native import Gap, GapReport, deployment_gap
from .policies import Place, Policies
from .scope import OUTSIDE, TOLERANCE
from .tally import Report, Stats, Worst

__all__ = [
    "OUTSIDE", "TOLERANCE", "Gap", "GapReport", "Options", "Place", "Policies", "Report", "Stats", "Worst", "check",
    "deployment_gap",
]  # fmt: skip
