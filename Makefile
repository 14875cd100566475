# Every command makes its own .venv and install all they need: Python 3.11, make and pip are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test test-slow test-all test-browser docs lint bench clean

$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) torch==2.13.0
	$(BIN)/pip install $(PIP_FLAGS) -e ".[report]"
	touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/pip install $(PIP_FLAGS) -e ".[dev]"
	touch $@

demo: $(VENV)/core
	$(BIN)/inrun demo

# Work is stolen from the end, so that tests of one file, which share jobs of several processes, stay with one worker. Three workers for
# two cores: jobs of several processes wait for each other, and for those that were made to hang.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

test: $(VENV)/dev
	$(PYTEST) -m "not slow and not browser"

# What `make test` leaves out.
test-slow: $(VENV)/dev
	$(PYTEST) -m "slow and not browser"

test-all: $(VENV)/dev
	$(PYTEST) -m "not browser"

# Report and explorer in Chromium, with axe-core; pictures go to docs/images. Needs npm, and: apt-get install chromium chromium-driver
test-browser: $(VENV)/dev
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ echo "no browser: apt-get install chromium chromium-driver"; exit 1; }
	$(BIN)/pip install $(PIP_FLAGS) selenium
	npm install --prefix tests/browser --no-audit --no-fund --silent
	INRUN_SCREENSHOTS=docs/images $(BIN)/python -m pytest -m browser tests/report tests/explorer

# The documentation, offline: open site/index.html.
docs: $(VENV)/core
	$(BIN)/pip install $(PIP_FLAGS) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/core
	$(BIN)/inrun bench

clean:
	rm -rf $(VENV)
