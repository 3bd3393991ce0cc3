# `make demo` sets up and runs the main job; `make test` sets up and runs the tests, `make test-all` every one.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
ACTIVATE := source .venv/bin/activate
DATABRICKS := .venv-databricks/bin/dbt

# A misspelt name would be ignored and the target run as if nothing had been said.
VARIABLES := INPUT VISITS SOURCE SEPARATE SAMPLE PYTHON
UNKNOWN := $(filter-out $(VARIABLES),$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
ifneq ($(UNKNOWN),)
$(error There is no variable $(UNKNOWN): the variables are $(VARIABLES))
endif
export INPUT VISITS SOURCE

.PHONY: help setup demo live services test test-all databricks lint mutations mutants torture bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## virtual environment, pins, jars, activate script; does nothing the second time
	@$(PYTHON) tools/setup.py

demo: setup ## run the case study: INPUT=folder to use your own, VISITS=n for another size, SOURCE=kafka for services, SEPARATE=true for a process a step
	@$(ACTIVATE) && python -m case_study.demo \
		$(if $(INPUT),--input "$$INPUT") $(if $(VISITS),--visits "$$VISITS") $(if $(SOURCE),--source "$$SOURCE") \
		$(if $(SEPARATE),--separate "$$SEPARATE")

live: setup ## run the live part of the case study: visits by HTTP, streams, a partner; INPUT, VISITS and SEPARATE as for demo
	@$(ACTIVATE) && python -m case_study.live \
		$(if $(INPUT),--input "$$INPUT") $(if $(VISITS),--visits "$$VISITS") $(if $(SEPARATE),--separate "$$SEPARATE")

services: setup ## run Kafka, PostgreSQL, Debezium and an S3 API until interrupted, and print how to reach them
	@$(ACTIVATE) && python -m services

test: setup ## run the tests, without those that kill processes, start clusters or replay the case study
	@$(ACTIVATE) && pytest --tier test

test-all: setup $(DATABRICKS) ## run every test, dbt-databricks' included, and the mutants
	@$(ACTIVATE) && pytest && python -m tools.mutants

databricks: setup $(DATABRICKS) ## compare what dbt-databricks sends with the package and without it
	@$(ACTIVATE) && pytest -o addopts= tests/macros/test_other_adapters.py

# An environment of its own: dbt-databricks and dbt-spark pin different drivers.
$(DATABRICKS): requirements-databricks.txt
	@$(PYTHON) -m venv .venv-databricks && .venv-databricks/bin/python -m pip install --quiet --requirement requirements-databricks.txt
	@touch $@

lint: setup ## ruff, mypy, sqlfluff, yamllint and the project's own checks
	@$(ACTIVATE) && python -m tools.lint

mutations: setup ## apply every committed mutation and require its test to fail: SAMPLE=n for other n each day
	@$(ACTIVATE) && python -m tests.mutations.runner $(if $(SAMPLE),--sample $(SAMPLE))

mutants: setup ## change modules without Spark in every small way: their tests must notice nine of ten, and the rest is listed
	@$(ACTIVATE) && python -m tools.mutants

torture: setup ## kill every writer 20 times and more, run two at once, lose executors: count lost and doubled rows
	@$(ACTIVATE) && python -m tests.torture

bench: setup ## run the side-by-side measurements and write docs/benchmarks.md
	@$(ACTIVATE) && python -m pip install --quiet --requirement requirements-benchmarks.txt && python -m benchmarks

docs: setup ## build the documentation site into site/
	@$(ACTIVATE) && python -m pip install --quiet --requirement requirements-docs.txt && mkdocs build --strict

clean: ## remove what runs leave behind; the environment stays
	@rm -rf lakehouse landing target logs site .pytest_cache .mypy_cache .ruff_cache
