# Every target sets itself up; `make` lists them.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet --quiet

.PHONY: demo test test-rest check bench docs site clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   training over a slow link, codec by codec: a table and demo.html (six minutes the first time)"
	@echo "make test   the tests (under eight minutes on two cores); the slow rest: make test-rest"
	@echo "make check  lint, format, types, layers"
	@echo "make bench  speed of formats, codecs, collectives and training beside others (two hours; links need root)"
	@echo "make docs   the tables in README and docs, made anew from saved results"
	@echo "make site   the documents as pages, in site/"

.venv/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed: install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$$($(PYTHON) --version) is too old: install Python 3.11 or newer, or run: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv: install it, on Debian or Ubuntu with: apt-get install python3-venv"; exit 1; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: .venv/.made pyproject.toml constraints.txt
	@echo "installing thinwire into .venv"
	@$(PIP) install --constraint constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	@$(PIP) install --constraint constraints.txt --editable '.[report]'
	@touch $@

.venv/.dev: .venv/.demo
	@echo "installing the test tools into .venv"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

.venv/.peers: .venv/.demo
	@echo "installing the libraries to compare with into .venv"
	@$(PIP) install --constraint constraints.txt --editable '.[peers]'
	@touch $@

demo: .venv/.demo
	@$(BIN)/thinwire demo

# Two workers share the cores, so each has one thread. Tests of several processes run one after another: they use
# all cores by themselves, and some watch the clock.
SEVERAL := tests/groups tests/launch tests/lab

test: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not rest" -n 2 $(SEVERAL:%=--ignore %)
	$(BIN)/python -m pytest -m "not rest" $(SEVERAL)

test-rest: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m rest -n 2 $(SEVERAL:%=--ignore %)
	$(BIN)/python -m pytest -m rest $(SEVERAL)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.peers
	$(BIN)/thinwire bench formats --save benchmarks/results
	$(BIN)/thinwire bench codecs --save benchmarks/results
	$(BIN)/thinwire bench collectives --save benchmarks/results
	$(BIN)/thinwire bench training --save benchmarks/results
	$(BIN)/thinwire bench parallel --save benchmarks/results
	$(BIN)/thinwire bench outer --save benchmarks/results --plot docs/figures/outer.svg
	$(BIN)/thinwire bench simulate --save benchmarks/results
	$(BIN)/thinwire study convergence --save benchmarks/results
	$(BIN)/thinwire demo --fresh --save benchmarks/results
	@$(MAKE) --no-print-directory docs

# Pages are made from sources, so that this needs neither torch nor thinwire, and stays apart from both.
.venv-site/.made: .venv/.made constraints.txt
	@echo "installing what makes the site into .venv-site"
	@$(PYTHON) -m venv .venv-site
	@.venv-site/bin/pip --disable-pip-version-check --quiet --quiet install --constraint constraints.txt \
	  mkdocs-material 'mkdocstrings[python]'
	@touch $@

site: .venv-site/.made
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs: .venv/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .venv-site site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache formats.png codecs.png demo.html thinwire.sqlite
