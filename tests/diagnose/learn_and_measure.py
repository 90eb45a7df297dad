"""Run by a test as a separate process: a few updates of a worker; prints the planned and the measured peak memory, in
bytes in addition to the memory before."""

import json
import sys
from pathlib import Path

from tests.groups import group
from whet.core.batch import Batch
from whet.core.packing import pack
from whet.diagnose.activations import activation_bytes, layer_bytes, model_size
from whet.diagnose.layout import lay_out
from whet.diagnose.memory import learner_memory, resident
from whet.learner.config import LearnerConfig, WorkerConfig
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.worker import LearnerWorker
from whet.losses.sft import SFTLoss
from whet.models.config import ModelConfig
from whet.models.loading import load_model_config
from whet.parallel.config import ParallelConfig
from whet.processes.machine import keep_freed_memory


def held(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def main(model: str, precision: str, checkpointing: bool) -> None:
    keep_freed_memory()  # as runs do
    rows, length = 32, 128
    config = ModelConfig(path=model)
    learner = LearnerConfig(precision=precision, max_tokens=rows * length, activation_checkpointing=checkpointing)
    hf = load_model_config(config)
    kept = activation_bytes(hf, [length] * rows, precision=precision, checkpointing=checkpointing)
    layer = layer_bytes(hf, [length] * rows, precision=precision)
    here = lay_out(config, ParallelConfig(), learner.precision, train=True)
    plan = learner_memory(
        model_size(hf),
        learner,
        ParallelConfig(),
        here,
        activations=kept,
        layer=layer,
        trained_tokens=rows * (length - 2),
        on_cpu=True,
    )
    before = resident()
    worker = LearnerWorker(WorkerConfig(model=config, learner=learner, optimizer=OptimizerConfig(), steps=3))
    groups = [group(str(i), [1, 2], [[3 + i % 200] * (length - 2)]) for i in range(rows)]
    batch = Batch.from_groups(groups, share_prompts=False).weigh("token")
    for _ in range(3):
        worker.update(pack(batch, 1, rows * length)[0], SFTLoss())
    print(json.dumps({"planned": plan.peak(), "measured": held("VmHWM") - before}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "checkpointing")
