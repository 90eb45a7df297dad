"""AdamW with moments in 8 bits takes on several ranks the steps of one process, bit for bit. Its compiled step is run
as it is written, without its compiler."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.learner.parts import assert_same
from tests.parallel.cases import Case, build, full_weights
from tests.parallel.ranks import on_ranks
from tests.parallel.saving import assert_passes_through_one_rank, pieces
from whet.learner.whole_matrices import cut_state
from whet.parallel.parameters import local

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'whet[torchao]'")
EIGHT = {"optimizer": {"moments": "8bit"}, "learner": {"precision": "float32"}}
LAYOUTS = [{"fsdp": 2}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"pipeline": 2, "fsdp": 2}]


@torch.compiler.set_stance("force_eager")
def step_on_equal_gradients(rendezvous: str, rank: int, case: Case, folder: Path) -> tuple[dict[str, Tensor], int]:
    """Take two steps on gradients that depend on a parameter's name alone, and save; return the weights, and the bytes
    of this rank's moments."""
    worker = build(case, rendezvous, rank)
    assert worker.optimizer is not None
    for step in range(2):
        for name, parameter in worker.module.by_name():
            random = torch.Generator().manual_seed(step + sum(name.encode()))
            gradient = {"of": torch.randn(parameter.shape, generator=random)}
            parameter.grad = cut_state(parameter, gradient)["of"]  # type: ignore[assignment]
        worker.optimizer.step()
    worker.state.save(folder)
    codes = [m.codes for state in worker.optimizer.state.values() for m in state.values() if hasattr(m, "codes")]
    return full_weights(worker), sum(local(each).numel() for each in codes)


@pytest.mark.parametrize("layout", [pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[1:]] + LAYOUTS[:1])
def test_moments_in_8_bits_do_not_depend_on_the_sharding(models, tmp_path, layout):
    """Also where a rank has fewer than the 4,096 numbers of a matrix from which on its moments are in 8 bits."""
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    case = Case(models["wide"], layout, **EIGHT)
    expected, alone = step_on_equal_gradients("", 0, case.one_rank(), tmp_path / "one")
    outputs = on_ranks(case.ranks, step_on_equal_gradients, case, tmp_path / "several")
    for weights, _ in outputs:
        assert_same({name: expected[name] for name in weights}, weights)
    assert alone > 0
    copies = 1 + ("pipeline" in layout)  # of tied embeddings
    assert sum(size for _, size in outputs) <= copies * alone
    scales = {name for name in pieces(tmp_path / "several") if "/scale/" in name}
    assert len(scales) == sum("/scale/" in name for name in pieces(tmp_path / "one")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=["tensor and fsdp", "pipeline and fsdp"])
def test_a_checkpoint_of_four_ranks_passes_through_one_rank_unchanged(models, tmp_path, layout):
    assert_passes_through_one_rank(Case(models["wide"], layout, **EIGHT), tmp_path)
