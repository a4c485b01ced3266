"""`python tests/fuzz [COUNT [PART OF A NAME [FIRST]]]`: damage so many files, from case FIRST on, and print the counts.

The exit code is 1 if one got by.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from driver import ALLOWED, fuzz, table
from targets import targets

count, only, first = ([*sys.argv[1:], *("5400", "", "0")[len(sys.argv) - 1 :]])[:3]
with tempfile.TemporaryDirectory() as folder, targets(Path(folder), only) as found:
    cases = list(fuzz(found, int(count), int(first)))
bad = [case for case in cases if case.outcome not in ALLOWED]
for case in bad:
    print(f"{case.outcome}: {case.target}, case {case.seed}, {case.damage}: {case.detail[:300]}")
print(table(cases))
sys.exit(bool(bad))
