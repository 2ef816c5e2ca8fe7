# Each target makes .venv first, once: with the interpreter that .ci/find-python picks, and what requirements.txt names.
#   make run ARGS="--help"        passes arguments on (also to bench, test, lab and figures)
#   make run PYTHON=python3.12    makes .venv with this interpreter (an existing .venv stays as it is: make clean first)

ARGS =
PYTHON =
# Test processes. A process that uses GPUs reserves most of their memory, so there only one runs at a time.
JOBS = $(if $(shell command -v nvidia-smi 2>/dev/null),0,2)
NOTEBOOKS = $(wildcard notebooks/*.ipynb)

# A `user = true` in somebody's pip configuration is refused inside a virtual environment.
export PIP_USER := 0

READY := .venv/ready
VENV_PYTHON := .venv/bin/python
PIP_INSTALL = $(VENV_PYTHON) -m pip install --disable-pip-version-check $(shell [ -t 2 ] || echo --quiet)

# The stamp is the last thing that a set-up writes, it holds the folder's path, and .venv's own interpreter reads it: an
# environment that was interrupted, was moved, or has lost its interpreter does not count, and is made anew.
ifneq ($(shell $(VENV_PYTHON) -c 'print(open("$(READY)").read())' 2>/dev/null),$(CURDIR))
NEW := yes
.PHONY: $(READY)
endif

.PHONY: help run bench test lab figures notebooks clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

run: $(READY) ## compare all methods on this machine: GPUs where there are some, simulated devices otherwise
	@$(VENV_PYTHON) -m cmm $(ARGS)

bench: $(READY) ## measure suites of problems in several processes (needs GPUs)
	@$(VENV_PYTHON) -m cmm.bench $(ARGS)

test: $(READY) ## fast tests, then every notebook (at most 10 minutes on 2 cores)
	$(VENV_PYTHON) -m pytest -n $(JOBS) --dist worksteal $(ARGS)
ifneq ($(NOTEBOOKS),)
	$(VENV_PYTHON) -m pytest -n $(JOBS) --dist loadscope --nbval --nbval-current-env --nbval-cell-timeout=120 $(NOTEBOOKS)
endif

lab: $(READY) ## open the notebooks in JupyterLab (as root: make lab ARGS=--allow-root)
	@$(VENV_PYTHON) -m jupyterlab notebooks $(ARGS)

figures: $(READY) ## redraw every figure, and the tables of the README, from the recorded measurements
	@$(VENV_PYTHON) -m cmm.plots $(ARGS)
	@$(VENV_PYTHON) -m cmm.readme

notebooks: $(READY) ## run every notebook and save its outputs in place
	@$(VENV_PYTHON) notebooks/execute.py $(ARGS)

clean: ## remove .venv, caches and build products; keeps out/
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

$(READY): requirements.txt pyproject.toml
	@[ -z "$(NEW)" ] && [ -e $@ ] || { python=$$(sh .ci/find-python $(PYTHON)) && \
	echo "Making .venv with $$python" && "$$python" -m venv --clear .venv; }
	@rm -f $@
	@jax=$$(sh .ci/find-jax) && \
	echo "Installing requirements.txt and $$jax into .venv: 210 MB to load (2 GB more with CUDA), a minute or two" && \
	$(PIP_INSTALL) -r requirements.txt "$$jax"
	@$(PIP_INSTALL) --no-deps --editable .
	@printf '%s' "$(CURDIR)" >$@
