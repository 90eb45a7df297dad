"""All causal families of transformers, made tiny: each equals its plain run, as it is trained and as it is sampled
from, or is refused in words when it is loaded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_forest_attention import forest, separately, states_and_gradients
from tests.models.tiny_families import FAMILIES, tiny_model
from whet.base.errors import ConfigError, WhetError
from whet.engines.torch.cached_model import open_engine
from whet.engines.torch.engine_model import unsupported_layers
from whet.models.attention.forest import forest_hidden
from whet.models.attention.states import supports_cached_decoding, supports_prefix_fork
from whet.models.families import select_attention
from whet.models.head import check_head
from whet.models.moe.experts import experts_of, use_grouped_experts
from whet.models.saved_activations import save_fewer_activations


def families(names: str) -> set[str]:
    return set(names.split())


# Encoders, models with unusual positions, and heads that are not a plain product.
REFUSED = families(
    """
    bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert minicpm3 prophetnet
    rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xlnet xmod
    """
)
# transformers can't swap their attention, or they carry a state along: they share prompts by copies of that ...
STATES = families(
    """
    axk2 biogpt bloom codegen deepseek_v32 doge falcon falcon_h1 glm_moe_dsa gpt_neo gpt_neox_japanese gptj
    granitemoehybrid hy_v4 inkling_text lfm2 lfm2_moe llama4_text mamba2 mpt nemotron nemotron_h olmo_hybrid phimoe
    qwen3_5_moe_text qwen3_5_text qwen3_next stablelm xglm zamba2 zaya
    """
)
# ... or are run as padded rows.
ROWS = families(
    """
    bamba bart bigbird_pegasus blenderbot blenderbot-small deepseek_v4 falcon_mamba git jamba mamba marian mbart minimax
    mllama moshi mvp openai-gpt pegasus plbart qwen4_exp_text recurrent_gemma rwkv trocr whisper xlm xlstm
    """
)
NOT_SAMPLED = ROWS - {"falcon_mamba", "jamba", "mamba"}  # trained, but not by the built-in generator
# Made of several models, of a package that isn't here, or not to be made small.
NOT_BUILT = families(
    """
    blt cohere_compass_text dbrx emu3 gemma3n gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2
    kimi_linear llama4 musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp reformer zamba
    """
)
# With segments of one token, which layers treat differently, and prompts of one and of several lengths.
DEEP, LENGTHS = [-1, 0, 0, 1, 1, -1, 5, 5, 6, 6, -1, 2], [7, 1, 9, 3, 1, 7, 1, 1, 4, 2, 12, 5]
TOLERANCE = 1e-5  # their norms round to float32

pytestmark = pytest.mark.slow


def load(model: Any) -> bool:
    """As ``load_model`` does it; whether prompts are shared."""
    use_grouped_experts(model)
    forest = select_attention(model)
    check_head(model)
    return forest


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT])
def test_a_family_equals_its_plain_run_or_is_refused_in_words(family: str) -> None:
    model: Any = tiny_model(family, torch.float32 if family == "xglm" else torch.float64)
    if any(True for _ in experts_of(model)):
        model.set_experts_implementation("eager")
    if family in REFUSED:
        with pytest.raises(WhetError, match="not supported yet"):
            load(model)
        return
    batch, paths = forest([-1 if family in ROWS else parent for parent in DEEP], LENGTHS)
    expected = states_and_gradients(model, separately(model, batch, paths))
    assert load(model) == (family not in ROWS)
    assert supports_prefix_fork(model.config) == (family in STATES)
    save_fewer_activations(model)
    states, gradients = states_and_gradients(model, forest_hidden(model, batch))
    torch.testing.assert_close(states, expected[0], atol=TOLERANCE, rtol=TOLERANCE)
    scale = max(float(gradient.abs().max()) for gradient in expected[1])
    torch.testing.assert_close(gradients, expected[1], atol=TOLERANCE * scale, rtol=TOLERANCE)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT | REFUSED])
def test_a_family_is_sampled_from_as_its_plain_run_says_or_refused_in_words(family: str) -> None:
    model = tiny_model(family, torch.float32)
    if family in NOT_SAMPLED:
        with pytest.raises(ConfigError, match=r"the torch generator cannot run .* It needs another generator"):
            open_engine(model)
        return
    prompt, reply = list(range(10, 24)), [5, 9, 17, 33]
    with torch.no_grad():
        plain: Tensor = model(input_ids=torch.tensor([prompt + reply]), use_cache=False).logits[0].double()
    expected = plain[len(prompt) - 1 : -1].log_softmax(-1)[range(4), reply]
    found = torch.tensor(open_engine(model).score_decode(prompt, reply), dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert unsupported_layers(model.config) is None or supports_cached_decoding(model.config)


def test_the_families_that_could_not_be_made_are_still_there_and_few() -> None:
    assert len(NOT_BUILT) < 20 < 150 < len(set(FAMILIES) - NOT_BUILT)
