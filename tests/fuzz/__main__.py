"""`python tests/fuzz [COUNT [PART OF A NAME]]`: damage so many files, print the counts, exit with 1 if one got by."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from driver import ALLOWED, fuzz, table
from targets import targets

count, only = int((sys.argv[1:] or ["5000"])[0]), (sys.argv[2:] or [""])[0]
with tempfile.TemporaryDirectory() as folder, targets(Path(folder), only) as found:
    cases = list(fuzz(found, count))
bad = [case for case in cases if case.outcome not in ALLOWED]
for case in bad:
    print(f"{case.outcome}: {case.target}, case {case.seed}, {case.damage}: {case.detail[:300]}")
print(table(cases))
sys.exit(bool(bad))
