"""Mixtures of experts: wherever their experts are and wherever tokens are routed from, they learn what one process
does. What is compared, and on what batches, is said in ``test_layouts.py``."""

import asyncio
import json
import shutil
from itertools import pairwise

import pytest
import torch

from tests.parallel.cases import CPU, Case, build
from tests.parallel.ranks import on_ranks
from tests.parallel.test_layouts import check
from tests.parallel.test_saving import folders, go_on
from tests.parallel.test_together import refused
from whet.errors import WhetError
from whet.models.config import LoraSettings, ModelConfig
from whet.models.loading import load_model
from whet.parallel.config import ParallelConfig
from whet.types import Distribution

EXPERT = {"fsdp": 2, "expert": 2}
BOTH = {"fsdp": 4, "expert": 2}
RECOMPUTED = {"activation_checkpointing": True}
TOP_P = Distribution(temperature=0.7, top_p=0.9)

QUICK = {
    "fsdp": ("moe", {"fsdp": 2}, {}),
    "expert": ("moe", EXPERT, {}),
    "expert, lora": ("moe", EXPERT, {"lora": True}),
    "expert, in tensor": ("moe", {"tensor": 2, "expert": 2}, {}),
}
THOROUGH_2 = {
    "fsdp, lora": ("moe", {"fsdp": 2}, {"lora": True}),
    "fsdp, recomputed": ("mixtral", {"fsdp": 2}, {"learner": RECOMPUTED}),
    "expert, recomputed": ("moe", EXPERT, {"learner": RECOMPUTED}),
    "expert, lora, recomputed": ("mixtral", EXPERT, {"lora": True, "learner": RECOMPUTED}),
    "expert, offload": ("moe", EXPERT | {"cpu_offload": True}, {}),
    "expert, an idle rank": ("mixtral", EXPERT, {"max_tokens": 10_000}),
    "expert, value": ("moe", EXPERT, {"loss": "value"}),
    "expert, top-p": ("mixtral", EXPERT, {"distribution": TOP_P, "loss": "entropy"}),
    "expert, in context": ("moe", {"context": 2, "expert": 2}, {}),
    "tensor": ("moe", {"tensor": 2}, {"loss": "entropy"}),
    "tensor, lora": ("mixtral", {"tensor": 2}, {"lora": True}),
    "tensor, recomputed": ("mixtral", {"tensor": 2}, {"learner": RECOMPUTED}),
    "expert, in tensor, lora": ("moe", {"tensor": 2, "expert": 2}, {"lora": True, "learner": RECOMPUTED}),
    "replicas": ("moe", {"replicas": 2}, {}),
}
THOROUGH_4 = {
    "fsdp": ("moe", {"fsdp": 4}, {"max_tokens": 60}),
    "fewer experts than ranks": ("two experts", {"fsdp": 4}, {}),
    "expert and fsdp": ("moe", BOTH, {}),
    "expert and fsdp, lora": ("mixtral", BOTH, {"lora": True}),
    "expert and fsdp, recomputed": ("mixtral", BOTH, {"learner": RECOMPUTED}),
    "an expert of two ranks": ("two experts", BOTH, {}),
    "expert 4": ("moe", {"fsdp": 4, "expert": 4}, {}),
    "expert and replicas": ("moe", {"replicas": 2, **EXPERT}, {}),
    "expert, fsdp and tensor": ("moe", {"fsdp": 2, "tensor": 2, "expert": 2}, {}),
    "expert 4, fsdp and tensor": ("mixtral", {"fsdp": 2, "tensor": 2, "expert": 4}, {"learner": RECOMPUTED}),
    "expert, fsdp and tensor, lora": ("moe", {"fsdp": 2, "tensor": 2, "expert": 2}, {"lora": True}),
    "expert, context and fsdp": ("moe", {"fsdp": 2, "context": 2, "expert": 4}, {"loss": "entropy"}),
    "fsdp and tensor": ("mixtral", {"fsdp": 2, "tensor": 2}, {}),
}
ROUGH = {
    "expert": ("deepseek", EXPERT, {}),
    "expert, lora": ("deepseek", EXPERT, {"lora": True}),
    "fsdp": ("deepseek", {"fsdp": 2}, {"learner": RECOMPUTED}),
    "expert, in context": ("deepseek", {"context": 2, "expert": 2}, {}),
    "experts that no token reaches": ("one-sided", EXPERT, {}),
}
"""DeepSeek's router computes in float32, whatever the model is in."""


def test_two_ranks_learn_the_same_as_one(models):
    check(models, QUICK)


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one_in_every_setting(models):
    check(models, THOROUGH_2)


@pytest.mark.slow
def test_four_ranks_learn_the_same_as_one(models):
    check(models, THOROUGH_4)


@pytest.mark.slow
def test_a_router_that_computes_in_float32_learns_nearly_the_same(models):
    check(models, ROUGH, 2e-5)
