"""Published sets of mathematical problems by name, as values: a task set with its path on the Hugging Face Hub. A copy
on this machine is read in the same way, as in ``data: {type: deepscaler, path: deepscaler.parquet}``."""

from whet.tasks.math.dataset import Math

DAPO_MATH = Math(
    path="hf:open-r1/DAPO-Math-17k-Processed:en:train"
)  # the published rows, each once instead of 100 times
DEEPSCALER = Math(path="hf:agentica-org/DeepScaleR-Preview-Dataset:train")
HENDRYCKS_MATH = Math(
    path="hf:nlile/hendrycks-MATH-benchmark:train", test_path="hf:nlile/hendrycks-MATH-benchmark:test"
)
NUMINA_MATH = Math(path="hf:AI-MO/NuminaMath-1.5:train")
SKYWORK_OR1_MATH = Math(path="hf:Skywork/Skywork-OR1-RL-Data:math")
