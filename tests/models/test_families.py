"""All causal families of transformers, made tiny: each equals its plain run, as it is trained and as it is sampled
from, or is refused in words when it is loaded."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_forest_attention import forest, separately
from tests.models.tiny_families import FAMILIES, tiny_model
from whet.errors import ConfigError, WhetError
from whet.generators.engine_model import EngineModel
from whet.models.experts import experts_of, use_grouped_experts
from whet.models.families import select_attention
from whet.models.forest_attention import forest_hidden
from whet.models.head import check_head


def families(names: str) -> set[str]:
    return set(names.split())


# Encoders, models that count positions in ways of their own, and heads that are not a plain product.
REFUSED = families(
    """
    bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert minicpm3 prophetnet
    rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xlnet xmod
    """
)
# Run as padded rows: transformers can't swap their attention, or they carry a state along.
ROWS = families(
    """
    axk2 bamba bart bigbird_pegasus biogpt blenderbot blenderbot-small bloom codegen deepseek_v32 deepseek_v4
    doge falcon falcon_h1 falcon_mamba git glm_moe_dsa gpt_neo gpt_neox_japanese gptj granitemoehybrid hy_v4
    inkling_text jamba lfm2_moe llama4_text mamba mamba2 marian mbart minimax mllama moshi mpt mvp nemotron
    nemotron_h olmo_hybrid openai-gpt pegasus phimoe plbart qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen4_exp_text recurrent_gemma rwkv stablelm trocr whisper xglm xlm xlstm zamba2 zaya
    """
)
NOT_SAMPLED = ROWS | {"diffllama", "gemma3n_text", "hrm_text"}  # trained, but not by the built-in generator
# Made of several models, of a package that isn't here, or not to be made small.
NOT_BUILT = families(
    """
    blt cohere_compass_text dbrx emu3 gemma3n gemma4_assistant gemma4_unified gemma4_unified_assistant got_ocr2
    kimi_linear llama4 musicgen musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp reformer zamba
    """
)
DEEP, LENGTHS = [-1, 0, 0, 1, -1], [7, 4, 9, 3, 12]
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
    with torch.no_grad():
        alone = separately(model, batch, paths)
        assert load(model) == (family not in ROWS)
        found = forest_hidden(model, batch)
    torch.testing.assert_close(found, alone, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_BUILT | REFUSED])
def test_a_family_is_sampled_from_as_its_plain_run_says_or_refused_in_words(family: str) -> None:
    model = tiny_model(family, torch.float32)
    if family in NOT_SAMPLED:
        with pytest.raises(ConfigError, match=r"the torch generator cannot run .* It needs another generator"):
            EngineModel(model)
        return
    prompt, reply = list(range(10, 24)), [5, 9, 17, 33]
    with torch.no_grad():
        plain: Tensor = model(input_ids=torch.tensor([prompt + reply]), use_cache=False).logits[0].double()
    expected = plain[len(prompt) - 1 : -1].log_softmax(-1)[range(4), reply]
    found = torch.tensor(EngineModel(model).score_decode(prompt, reply), dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_families_that_could_not_be_made_are_still_there_and_few() -> None:
    assert len(NOT_BUILT) < 20 < 150 < len(set(FAMILIES) - NOT_BUILT)
