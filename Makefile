# make demo     set up, start two ranks on the embedded model, answer a prompt, serve until Ctrl-C
# make quick    pure modules and fakes, for while you write
# make test     one story for each promise       make test-all   the whole page, all apps and families, too
# make chaos    the whole fault matrix
# make lint     ruff and strict types            make format  what ruff can mend, mended
# make bench    benchmarks, one table
# make fuzz     inputs that reach new code of everything that reads what others wrote (Linux)
# make images   the pictures of the page in docs/images, by the system's Chromium
# make reference  the pages of docs/ that are read off the code: settings, commands, faults
# make package  wheel, source archive and Homebrew formula in dist/, tried in a fresh environment
# make release  checks, then package, notes and hashes in dist/; RELEASE_ARGS=--dry-run says what is in the way
# make fresh    `make demo` as on a new machine, with Python alone and, if UV names one, with uv alone
# make coverage  `make test-all`, with the lines and branches of mlxtp/ that it runs
# make mutants  faults put into pure modules one by one; tests must notice (hours; MUTANTS_ARGS="*place*" for some)
# make soak     an hour of mixed load while ranks and agents fail; SOAK_ARGS="--minutes 5" for less
# make apps     install coding agents, chat apps and client libraries, run each, print a table (needs npm);
#               APPS_ARGS="--only codex,claude" for some
# make peers    tests of vLLM, llama.cpp, Ollama and others, fetched and run against the endpoint (nightly; needs
#               npm and git); PEERS_ARGS="--only vllm" for some
#
# Needs uv, or Python 3.11 to 3.14. Everything is installed into .venv, within constraints.txt, and only with a
# hash that stands in hashes.txt.

VENV := .venv
EXTRAS ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# For what starts hundreds of processes, so that none compiles what another has compiled.
MANY := PYTHONDONTWRITEBYTECODE= $(BIN)/python
DEMO_ARGS ?=
TEST_ARGS ?=
RING ?= not chaos
WORKERS ?= 2
CHAOS_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
MUTANTS_ARGS ?=
SOAK_ARGS ?=
APPS_ARGS ?=
PEERS_ARGS ?=
RELEASE_ARGS ?=

.PHONY: setup demo quick test test-all test-groups test-others lint bench chaos coverage format fuzz mutants soak apps peers images reference package release fresh clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hashes.txt scripts/setup.sh scripts/locked.py
	@sh scripts/setup.sh $(VENV) $(EXTRAS)
	@touch $(STAMP)

demo: setup
	$(BIN)/mlxtp demo $(DEMO_ARGS)

quick: setup
	$(MANY) -m pytest -n 2 --max-worker-restart 0 --dist loadfile -m "not chaos and not whole and not group and not slow" $(TEST_ARGS)

# Ranks of a group wait for each other many times a token, and their tests measure times. So two tests with
# groups run at once, and before the others where both want a core.
test: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-others test-groups RING="not chaos and not whole" WORKERS=3

test-all: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-others test-groups

test-others: setup
	nice -n 5 env $(MANY) -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile -m "$(RING) and not group" $(TEST_ARGS) || [ $$? = 5 ]

# Shown as a whole at its end. pytest exits with 5 where TEST_ARGS leave nothing of a part.
test-groups: setup
	@status=0; $(MANY) -m pytest -n 2 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder -m "$(RING) and group" $(TEST_ARGS) \
	  >$(VENV)/groups.log 2>&1 || status=$$?; \
	  cat $(VENV)/groups.log; [ $$status = 0 ] || [ $$status = 5 ]

chaos: setup
	$(MANY) -m pytest -m "chaos or fault" $(CHAOS_ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(MANY) -m benchmarks $(BENCH_ARGS)

fuzz: setup
	@$(BIN)/python -c 'import atheris' 2>/dev/null || sh scripts/setup_tool.sh $(VENV) atheris
	$(BIN)/python -m tests.fuzzing $(FUZZ_ARGS)

# Ranks and tokenizers that are killed leave no data. Other processes write theirs when they end.
coverage: export COVERAGE_FILE = $(CURDIR)/$(VENV)/coverage/data
coverage: setup
	@$(BIN)/python -c 'import coverage' 2>/dev/null || sh scripts/setup_tool.sh $(VENV) coverage
	rm -rf $(VENV)/coverage && mkdir $(VENV)/coverage
	-COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(MAKE) test-all
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered

mutants: setup
	@$(BIN)/python -c 'import mutmut' 2>/dev/null || sh scripts/setup_tool.sh $(VENV) mutmut
	$(BIN)/mutmut run $(MUTANTS_ARGS)

soak: setup
	$(MANY) -m tests.soak $(SOAK_ARGS)

apps: setup
	$(BIN)/python -m tests.apps $(APPS_ARGS)

peers: setup
	$(BIN)/python -m tests.peers $(PEERS_ARGS)

images: setup
	$(BIN)/python scripts/images.py

reference: setup
	$(BIN)/python -m scripts.reference

package: setup
	sh packaging/package.sh $(BIN)/python

release: setup
	$(BIN)/python -m scripts.release $(RELEASE_ARGS)

# Paths, because a name would be looked for in what PATH has left.
fresh: setup
	sh packaging/fresh.sh "$$($(BIN)/python -c 'import sys; print(sys._base_executable)')" $(UV)

clean:
	rm -rf $(VENV) build dist mutants .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
