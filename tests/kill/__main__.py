"""`python tests/kill [COUNT [PART OF A NAME]]`: kill every stage so often, print the counts, exit with 1 on a fault."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import kill, table
from stages import STAGES

count, only = int((sys.argv[1:] or ["100"])[0]), (sys.argv[2:] or [""])[0]
outcomes = []
for stage in STAGES:
    if only in stage.name:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(kill(stage, count, Path(folder)))
        if not outcomes[-1].good:
            print(f"{stage.name}: {outcomes[-1].detail}", flush=True)
print(table(outcomes))
sys.exit(not all(each.good for each in outcomes))
