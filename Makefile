# Everything runs in .venv. `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint bench bench-accuracy clean

demo: $(VENV)/.ready
	$(BIN)/vlcache demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# About 20 minutes on two cores
bench: $(VENV)/.ready
	$(BIN)/vlcache bench ttft --shape qwen2.5-vl-3b --image-tokens 256
	$(BIN)/vlcache bench ttft --shape qwen2.5-vl-3b --image-tokens 1008
	$(BIN)/vlcache bench ttft --shape qwen2.5-vl-3b --image-tokens 2304

$(VENV)/.ready: pyproject.toml constraints.txt tools/cpu_torchvision.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,test,lint]"
	$(BIN)/python tools/cpu_torchvision.py
	$(BIN)/python -m evalmodel.weights
	touch $@

# About two hours on two cores
bench-accuracy: $(VENV)/.ready
	$(BIN)/vlcache bench accuracy --items 200

clean:
	rm -rf $(VENV)
