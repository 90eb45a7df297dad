"""AdamW with moments in 8 bits, on CPUs as on GPUs, and products in float8, which a CPU
only emulates. The optimizer's compiled step is run as it is written here, without its compiler."""

import pytest
import torch
from safetensors.torch import load_file

from tests.learner.parts import (
    PolicyGradient,
    assert_same,
    cut,
    gradients,
    save_model,
    some_batch,
    weights,
    whole,
    worker,
)
from tests.tiny import tiny_qwen3
from whet.base.errors import WhetError
from whet.learner.optimizer_config import OptimizerConfig
from whet.learner.precision import use_float8

pytest.importorskip("torchao", reason="torchao is not installed: pip install 'whet[torchao]'")
EIGHT = OptimizerConfig(lr=1e-2, weight_decay=0.1, warmup_steps=2, schedule="cosine", moments="8bit")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Some of its matrices have the 4,096 numbers from which on moments are in 8 bits."""
    return save_model(tmp_path_factory.mktemp("model"), tiny_qwen3())


@pytest.fixture(autouse=True)
def _without_compiler():
    with torch.compiler.set_stance("force_eager"):
        yield


def test_steps_with_moments_in_8_bits_are_nearly_those_of_adamw(model):
    wide = worker(model, precision="float32", optimizer=EIGHT.model_copy(update={"moments": "float32"}))
    narrow = worker(model, precision="float32", optimizer=EIGHT)
    before = weights(narrow)
    for step in range(4):
        for learner in (wide, narrow):
            assert learner.update(whole(some_batch(step)), PolicyGradient()).lr == pytest.approx(
                [0.005, 0.01, 0.01, 0.0096][step], rel=0.01
            )
    right, found = weights(wide), weights(narrow)
    moved = sum(float((right[name] - start).square().sum()) for name, start in before.items())
    off = sum(float((right[name] - found[name]).square().sum()) for name in before)
    assert 0 < off < 0.02 * moved


@pytest.mark.parametrize("background", [False, True])
def test_a_saved_learner_with_moments_in_8_bits_goes_on_bit_for_bit(model, tmp_path, background):
    straight = worker(model, precision="float32", optimizer=EIGHT)
    straight.update(cut(some_batch(0), 30), PolicyGradient())
    if background:
        straight.state.begin_save(tmp_path)
        straight.state.finish_save()
    else:
        straight.state.save(tmp_path)
    saved = load_file(tmp_path / "optimizer.safetensors")
    assert saved["exp_avg/codes/model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    resumed = worker(model, precision="float32", optimizer=EIGHT, seed=5)
    resumed.state.load(tmp_path)
    straight.sleep()
    straight.wake()
    for step in (2, 3):
        for learner in (straight, resumed):
            learner.update(cut(some_batch(step), 30), PolicyGradient())
    assert_same(weights(straight), weights(resumed))


@pytest.mark.parametrize(("saved", "wanted"), [("8bit", "float32"), ("float32", "8bit")])
def test_moments_of_another_kind_are_refused(model, tmp_path, saved, wanted):
    first, other = (worker(model, precision="float32", optimizer=OptimizerConfig(moments=k)) for k in (saved, wanted))
    first.update(whole(some_batch()), PolicyGradient())
    first.state.save(tmp_path)
    before = weights(other)
    with pytest.raises(WhetError, match=r"exp_avg.* is .*optimizer\.moments"):
        other.state.load(tmp_path)
    assert_same(before, weights(other))


def test_products_in_float8_are_off_by_its_rounding_and_weights_stay_what_they_were(model):
    batch = whole(some_batch())
    wide, narrow = worker(model, precision="float32"), worker(model, precision="float32")
    assert use_float8(narrow.model, narrow.device, emulate=True) == 7 * len(narrow.model.model.layers)
    assert_same(weights(wide), weights(narrow))
    right, found = (one.score(batch, {"logprobs"})[0]["logprobs"] for one in (wide, narrow))
    assert 1e-5 < (right - found).abs().max() < 0.2
    exact = gradients(wide, batch, PolicyGradient())
    for name, gradient in gradients(narrow, batch, PolicyGradient()).items():
        assert gradient.dtype == torch.float32
        assert float((gradient - exact[name]).norm() / exact[name].norm()) < 0.3, name
