"""`recast report`: evaluated runs compared in tables, figures and one web page.

`report` writes everything from folders of runs. The statistics behind the tables (`pool`, `pairs`,
`seed_difference`, `difference`, `pareto`) take `Run` objects and need no files.
"""

from recast.report.compare import (
    AGGREGATE,
    Difference,
    Pooled,
    Run,
    difference,
    pairs,
    pareto,
    pool,
    seed_difference,
    wins,
)
from recast.report.figures import gain_figure
from recast.report.stage import Report, report

__all__ = [
    "AGGREGATE",
    "Difference",
    "Pooled",
    "Report",
    "Run",
    "difference",
    "gain_figure",
    "pairs",
    "pareto",
    "pool",
    "report",
    "seed_difference",
    "wins",
]
