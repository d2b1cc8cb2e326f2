# make report   sets up and runs the main job, to results/report.html
# make test     sets up and passes the tests
# make check    sets up and passes lint and the fast tests
# make setup-slurm   sets up for runs on Slurm, too (docs/clusters.md)
# make setup-s3      sets up for a golden that is kept on S3, too (docs/clusters.md)
# make setup-distributed   sets up for ranks that Ray starts, too (docs/distributed.md)
# make tutorial SEED=N   sets up and makes a folder with a port that has one mistake to find (docs/tutorial.md)
# make tutorial-answer SEED=N   prints the diff that corrects this port
# make docs     sets up and builds the site of the docs, in site/
# make bench    sets up and prints what jobs take at full size (needs 12 GB of memory and 15 GB of disk)
# make lower-bounds   passes the fast tests with the oldest versions that pyproject.toml allows
# make same BASE=COMMIT   lists every file of results/ in which the default run differs from that of another commit
# make hangs SEED=N   draws 120 programs that hang and 200 that do not, and prints what was said of them (half an hour)
# make report-cases   runs five cases and takes pictures of their reports (ten minutes)
# make bugs     sets up and prints what Layerproof and other rules find of a corpus of porting bugs (half an hour)
# make families SEED=N   judges every causal model of transformers as its own port (half an hour; goes on where it ended)
# make false-alarms N=1000 SEED=S   counts false alarms in N stages of models drawn at random (half an hour; goes on, too)
# PYTHON=...    the Python to set up with, in place of the one that requirements/find-python.sh finds

VENV := .venv
CORES ?= all
SEED ?= 1
N ?= 1000
TUTORIAL ?= tutorial
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: report tutorial tutorial-answer docs test check fast lower-bounds lint types style same bugs families false-alarms hangs report-cases bench setup setup-slurm setup-s3 setup-distributed setup-dev

report: setup
	layerproof run --exit-zero --cores $(CORES)

tutorial: setup
	@python tests/tutorial.py plant $(SEED) $(TUTORIAL)

tutorial-answer: setup
	@python tests/tutorial.py answer $(SEED)

docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict

test: setup-dev lint
	OMP_NUM_THREADS=1 pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=10

check: setup-dev
	$(MAKE) --no-print-directory --jobs 2 --output-sync fast types style

fast: setup-dev
	OMP_NUM_THREADS=1 pytest -n 2 -m "not slow and not workflow"

lower-bounds: $(VENV)/bin/uv
	uv venv --quiet --clear --python $(VENV)/bin/python $(VENV)/lower
	uv pip install --quiet --python $(VENV)/lower/bin/python --resolution lowest-direct --editable '.[xla,s3,dev]'
	OMP_NUM_THREADS=1 $(VENV)/lower/bin/python -m pytest -n 2 -m "not slow and not workflow"

same: setup-dev
	python tests/same.py $(BASE)

report-cases: setup-dev
	PYTHONPATH=workflow:tests:tests/workflow:tests/report python tests/report_cases.py

bugs: setup-dev
	python tests/bugs/run.py
	python tests/bugs/run_ranks.py

families: setup-dev
	python tests/families/run.py --seed $(SEED)
	python tests/families/command.py --seed $(SEED)

false-alarms: setup-dev
	python tests/families/false_alarms.py --stages $(N) --seed $(SEED)

hangs: setup-dev
	python tests/hangs/run.py --seed $(SEED)

bench: setup-dev
	python benchmarks/run.py

lint: setup-dev
	$(MAKE) --no-print-directory --jobs 2 --output-sync types style

types:
	pyright

style:
	ruff check .
	ruff format --check .
	snakefmt --check --diff Snakefile workflow/rules
	snakemake --lint
	lint-imports --no-cache

setup: $(VENV)/run.done

setup-slurm: $(VENV)/slurm.done

setup-distributed: $(VENV)/distributed.done

setup-s3: $(VENV)/s3.done

setup-dev: $(VENV)/dev.done
	bash tests/install-chromium.sh

$(VENV)/bin/uv: requirements/uv.txt
	python=$(or $(PYTHON),"$$(sh requirements/find-python.sh)") && "$$python" -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --require-hashes -r requirements/uv.txt

$(VENV)/docs.done: requirements/docs.txt $(VENV)/bin/uv
	uv venv --quiet --clear --python $(VENV)/bin/python $(VENV)/docs
	uv pip install --quiet --python $(VENV)/docs/bin/python --require-hashes -r $<
	touch $@

$(VENV)/%.done: requirements/%.txt $(VENV)/bin/uv
	uv pip install --quiet --python $(VENV)/bin/python --require-hashes --compile-bytecode -r $<
	uv pip install --quiet --python $(VENV)/bin/python --no-deps --no-build-isolation --editable .
	touch $@
