# Everything here needs Python 3.11 (or newer) and make; `make setup` brings the rest into .venv.
PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
# Pulumi's environment, as Pulumi.yaml names it, with the test tools added.
INFRA_VENV := infra/.venv
INFRA_PY   := $(INFRA_VENV)/bin/python
# Airflow's, for the tests of jobs/airflow.
AIRFLOW_VENV := .venv-airflow
AIRFLOW_PY   := $(AIRFLOW_VENV)/bin/python

.PHONY: help setup demo test test-slow test-airflow e2e lint format lock clean

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/.converter: requirements/converter.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/converter.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.converter
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

$(INFRA_VENV)/.dev: requirements/infra-dev.txt
	$(PYTHON) -m venv $(INFRA_VENV)
	$(INFRA_PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/infra-dev.txt
	@touch $@

$(AIRFLOW_VENV)/.dev: requirements/airflow.txt
	$(PYTHON) -m venv $(AIRFLOW_VENV)
	$(AIRFLOW_PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/airflow.txt
	@touch $@

setup: $(VENV)/.dev $(INFRA_VENV)/.dev  ## Create .venv and infra/.venv with the locked development dependencies

demo: $(VENV)/.converter  ## Convert a small Qwen3-shaped checkpoint, inspect it and check it bit by bit
	$(PY) -m benchmarks.demo

.PHONY: image test-image

image:  ## Build the converter's image with docker, podman or buildah (images/build.sh tells the settings)
	images/build.sh converter

$(VENV)/.image: requirements/image.txt $(VENV)/.dev
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/image.txt
	@touch $@

test-image: $(VENV)/.image  ## Build the image on a small Debian and run conversions in it (docs/images.md: what it needs)
	$(VENV)/bin/hadolint images/*/Dockerfile
	$(PY) -m pytest -m slow -rs tests/images

# Two at a time; what runs alone is left so: it measures memory and time, or ends processes at its moments.
test: setup  ## Run the fast tests
	$(PY) -m pytest -n 2 --dist worksteal
	$(INFRA_PY) -m pytest --confcutdir=tests/infra tests/infra

test-slow: setup  ## Run the slow tests (memory, speed of large checkpoints, kill tests)
	$(PY) -m pytest -m slow

.PHONY: test-faults

test-faults: setup  ## Run conversions against broken buckets and networks, and end them at any moment
	$(PY) -m pytest -m faults

test-airflow: $(AIRFLOW_VENV)/.dev  ## Run the tests of the Airflow DAG (installs Airflow into .venv-airflow)
	$(AIRFLOW_PY) -m pytest --confcutdir=tests/jobs tests/jobs/dags

e2e: setup  ## Run the flows against the cluster in $KUBECONFIG, which needs Kueue; it is cleaned up again
	$(PY) -m pytest tests/e2e -m e2e -rs

lint: setup  ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/mypy.ini
	$(INFRA_PY) -m mypy -p infra

format: setup  ## Rewrite the code in the project's style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock: setup  ## Resolve the dependencies anew into requirements/*.txt
	$(PY) -m pip install --quiet uv
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' pyproject.toml -o requirements/converter.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' -c requirements/converter.txt --group jobs -o requirements/jobs.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' -c requirements/converter.txt -c requirements/jobs.txt --extra dev \
	  --group jobs-dev pyproject.toml -o requirements/dev.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' --group infra -o requirements/infra.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' requirements/image.in -o requirements/image.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' -c requirements/infra.txt --group infra-dev -o requirements/infra-dev.txt
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make lock' --group airflow -o requirements/airflow.txt

clean:  ## Remove what the other targets made
	rm -rf $(VENV) $(INFRA_VENV) $(AIRFLOW_VENV) tmp .pytest_cache .mypy_cache .ruff_cache
