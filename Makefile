# Each target alone is enough on a fresh machine with Python >= 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: run test fuzz kill docs bench clean

run: $(STAMP)
	$(BIN)/recast run recipes/shapes.yaml --out runs/shapes

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# Thousands of damaged files; the suite has a few hundred of the same.
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz 5400

# Every stage killed a hundred times at random moments, resumed and compared; the suite does a dozen of each.
kill: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill 100

# The site, from docs/ and the docstrings, without network; the variable silences a notice of the theme's authors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python benchmarks/sinkhorn.py
	$(BIN)/python benchmarks/estimator.py
	$(BIN)/python benchmarks/surrogate.py
	$(BIN)/python benchmarks/credit.py
	$(BIN)/python benchmarks/policy.py
	$(BIN)/python benchmarks/families.py
	$(BIN)/python benchmarks/shapes.py
	$(BIN)/python benchmarks/estimate.py
	$(BIN)/python benchmarks/train.py
	$(BIN)/python benchmarks/shapes_training.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/judge.py
	$(BIN)/python benchmarks/startup.py

# The stamp is written last and renamed into place, so an interrupted install leaves none.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("make installs the exact versions of constraints.txt, which need Python >= 3.11, not " + sys.version.split()[0] + ": set PYTHON=python3.11, or use pip install -e \".[dev]\"" if sys.version_info < (3, 11) else 0)'
	rm -f $@
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@.new && mv $@.new $@

clean:
	rm -rf $(VENV) runs site
