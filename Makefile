# make demo: train CartPole until solved and evaluate it.  make test: everything the project promises.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

$(VENV)/.core: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	@$(BIN)/pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[dev,box2d,atari]'
	@touch $@

demo: $(VENV)/.core
	@rm -rf runs/demo
	$(BIN)/slipstream train CartPole-v1 --run runs/demo
	$(BIN)/slipstream eval runs/demo
	@echo
	@echo "The run is in runs/demo. Next:"
	@echo "  $(BIN)/slipstream replay runs/demo                          execute it again, bit for bit"
	@echo "  $(BIN)/tensorboard --logdir runs                            its curves"
	@echo "  $(BIN)/slipstream train Acrobot-v1 --update hogwild         another environment, another rule"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

bench: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -e '.[bench]'
	$(BIN)/python benchmarks/cartpole.py

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info
