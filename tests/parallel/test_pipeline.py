"""Layers that are spread over ranks learn the same as in one process."""

from tests.parallel.test_layouts import check

PIPELINE = {"pipeline": 2}
INTERLEAVED = {"pipeline": 2, "stages_per_rank": 2}

QUICK = {
    "1f1b": ("llama", PIPELINE, {}),
    "1f1b, tied": ("qwen", PIPELINE, {}),
    "1f1b, lora": ("qwen", PIPELINE, {"lora": True}),
    "interleaved": ("qwen of 4", INTERLEAVED, {"max_tokens": 30}),
}
def test_a_pipeline_of_two_ranks_learns_the_same_as_one(models):
    check(models, QUICK)
