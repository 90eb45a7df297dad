"""Built-in algorithms by the name that recipes use."""

ALGORITHMS = {"grpo": "whet.algorithms.grpo:GRPO"}
