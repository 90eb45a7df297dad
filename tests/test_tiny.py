"""The fakes of the tests are what they claim to be."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import VOCAB, tiny_gemma, tiny_llama, tiny_qwen3, tiny_tokenizer, vocab_id


def test_any_text_survives_encoding_and_every_id_is_in_the_vocabulary():
    tokenizer = tiny_tokenizer()
    text = "Héllo\n  wörld 日本 <|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < VOCAB
    assert vocab_id("<|im_end|>") == tokenizer.eos_token_id in ids


def test_models_depend_on_the_seed_alone_and_leave_the_global_one_be():
    before = torch.random.get_rng_state()
    first, same, other = tiny_llama(seed=1), tiny_llama(seed=1), tiny_llama(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_models_and_tokenizer_survive_saving(tmp_path):
    tokens = torch.arange(24)[None]
    for build in (tiny_llama, tiny_qwen3, tiny_gemma):
        model = build()
        model.save_pretrained(tmp_path / build.__name__)
        tiny_tokenizer().save_pretrained(tmp_path / build.__name__)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / build.__name__)
        assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-5)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / build.__name__)
        assert tokenizer.chat_template == tiny_tokenizer().chat_template
        assert tokenizer("a b")["input_ids"] == tiny_tokenizer()("a b")["input_ids"]


def test_gemma_has_a_sliding_layer():
    far = torch.zeros(1, 20, dtype=torch.long)
    changed = far.clone()
    changed[0, 0] = 5
    model = tiny_gemma(layer_types=["sliding_attention", "sliding_attention"], sliding_window=4)
    assert torch.allclose(model(far).logits[0, -1], model(changed).logits[0, -1], atol=1e-6)
