"""Mixtures of experts: wherever their experts are and wherever tokens are routed from, they learn what one process
does. The table's tests are those of ``test_layouts.py``."""

import pytest

from tests.parallel.test_layouts import check

EXPERT = {"fsdp": 2, "expert": 2}
RECOMPUTED = {"learner": {"activation_checkpointing": True}}

QUICK = {
    "fsdp": ("moe", {"fsdp": 2}, {}),
    "expert": ("moe", EXPERT, {}),
    "expert, lora": ("moe", EXPERT, {"lora": True}),
    "expert, in tensor": ("moe", {"tensor": 2, "expert": 2}, {}),
}


def test_two_ranks_learn_the_same_as_one(models):
    check(models, QUICK)
