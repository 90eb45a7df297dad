"""A decoder cut into stages says what it says whole."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaModel

from tests.parallel.cases import Case, batch_of
from tests.tiny import tiny_gemma, tiny_llama, tiny_qwen3
from tests.tiny_vision import FAMILIES, saved_families
from whet.base.errors import WhetError
from whet.core.types import Distribution
from whet.models.attention.forest import decoder_of, forest_hidden, use_forest_attention
from whet.models.config import ModelConfig
from whet.models.images import embedded, of_tower
from whet.models.loading import load_images, load_model
from whet.models.shards import Tokens
from whet.models.stages import StageInput, check_stages, deep_features, drop_other_layers, stages_of


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_gemma])
def test_stages_one_after_the_other_are_the_model(make):
    model, batch = make(dtype=torch.float64), batch_of(Case(Path(), distribution=Distribution()), 0)
    use_forest_attention(model)
    check_stages(model, 2, False)
    tokens = Tokens()
    tokens.least = len(batch) + 3  # padding changes nothing
    hidden = None
    with torch.no_grad():
        for stage in stages_of(decoder_of(model), 2):
            hidden = forest_hidden(model, batch, tokens, StageInput(stage, hidden))
        assert torch.equal(hidden, forest_hidden(model, batch))


READING = {family: 2 for family in FAMILIES if family not in ("qwen3_5", "gemma4")} | {"qwen3_vl_moe": 4}
"""Models that read images, and their number of stages. Four stages cut between layers that add features of images."""


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    return saved_families(tmp_path_factory, (*READING, "gemma4"))


@pytest.mark.parametrize(("family", "count"), READING.items())
def test_stages_one_after_the_other_read_images_as_the_model(reading, family, count):
    """Each with its own parts alone; only the first has the vision tower."""
    config = ModelConfig(path=str(reading[family]), vision="trained")
    model, images = load_model(config, dtype=torch.float64, train=False), load_images(config)
    batch, tokens, hidden, names = batch_of(Case(reading[family], vision="trained"), 0), Tokens(), None, set()
    tokens.least = len(batch) + 3
    check_stages(model, count, True)
    with torch.no_grad():
        expected = forest_hidden(model, batch, embedded=embedded(model, batch, images))
        for stage in stages_of(decoder_of(model), count, deep_features(model)):
            part = copy.deepcopy(model)
            drop_other_layers(part, [stage])
            names |= (own := set(part.state_dict()))
            assert bool(own & of_tower(model).keys()) is stage.first
            entering = StageInput(stage, hidden)
            inputs = embedded(part, batch, images, tokens, entering)
            hidden = forest_hidden(part, batch, tokens, entering, embedded=inputs)
    assert torch.equal(hidden, expected)
    assert names == model.state_dict().keys()


def test_layers_that_embed_tokens_again_are_refused(reading):
    config = ModelConfig(path=str(reading["gemma4"]), vision="trained")
    with pytest.raises(WhetError, match="has layers that embed tokens again, so it can't be split into stages"):
        check_stages(load_model(config, dtype=torch.float32, empty=True), 2, True)


def test_what_no_stage_needs_is_dropped_and_the_rest_keeps_its_names():
    model = tiny_qwen3(num_hidden_layers=3)
    names = {name: p.numel() for name, p in model.named_parameters()}
    parts = []
    for stage in range(3):
        part = tiny_qwen3(num_hidden_layers=3)
        drop_other_layers(part, [stages_of(part.get_decoder(), 3)[stage]])
        parts.append({name: p.numel() for name, p in part.named_parameters()})
    assert parts[0] | parts[1] | parts[2] == names
    assert parts[0].keys() & parts[2].keys() == {"model.embed_tokens.weight"}  # tied: it is the head
    assert all(name.startswith("model.layers.1.") for name in parts[1])


class Scaled(LlamaModel):
    def forward(self, *args, inputs_embeds=None, **named):
        return super().forward(*args, inputs_embeds=inputs_embeds * 2, **named)


def test_a_model_that_does_more_than_its_layers_is_refused():
    model = tiny_llama()
    use_forest_attention(model)
    model.get_decoder().__class__ = Scaled
    with pytest.raises(WhetError, match="changes hidden states outside of its layers"):
        check_stages(model, 2, False)


def test_a_model_with_more_than_a_decoder_is_refused():
    model = tiny_llama()
    use_forest_attention(model)
    model.tower = nn.Linear(2, 2)
    with pytest.raises(WhetError, match=r"more than a decoder and a head \(tower.weight\)"):
        check_stages(model, 2, False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_share_keys_and_values_are_refused(device):
    model = tiny_llama().to(device)
    use_forest_attention(model)
    check_stages(model, 2, False)
    model.config.num_kv_shared_layers = 1
    with pytest.raises(WhetError, match="use the keys and values of other layers, so it can't be split into stages"):
        check_stages(model, 2, False)


def test_layers_are_divided_evenly():
    for layers in range(1, 9):
        decoder = nn.Module()
        decoder.layers = nn.ModuleList(nn.Identity() for _ in range(layers))
        for count in range(1, layers + 1):
            stages = stages_of(decoder, count)
            sizes = [len(stage.layers) for stage in stages]
            assert [i for stage in stages for i in stage.layers] == list(range(layers))
            assert max(sizes) - min(sizes) <= 1
            assert (sizes[0], sizes[-1]) == (max(sizes), min(sizes))
        with pytest.raises(WhetError, match=f"has {layers} layers, too few for {layers + 1} stages"):
            stages_of(decoder, layers + 1)
