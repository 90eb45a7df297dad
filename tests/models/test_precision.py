"""The choice of a precision from rates, and the rates of this machine."""

import os
import subprocess
import sys

import pytest
import torch

from tests.tiny import tiny_llama, tiny_qwen3_moe
from whet.models import precision, rates
from whet.models.precision import Instructions, choose_precision
from whet.models.rates import Rates, Shapes, measure

OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.fixture(autouse=True)
def measured_anew():
    measure.cache_clear()
    yield
    measure.cache_clear()


@pytest.mark.parametrize(
    ("measured", "chosen", "emulates"),
    [
        (Rates(60, 160, 40, 90), "bfloat16", False),
        (Rates(100, 150, 50, 75), "bfloat16", False),
        (Rates(100, 149, 50, 74), "float32", False),
        (Rates(100, 100, 50, 50), "float32", False),
        (Rates(60, 13, 43, 1.7), "float32", True),
        (Rates(60, 160, 43, 1.7), "float32", True),
        (Rates(60, 55, 43, 40), "float32", False),
    ],
    ids=["fast", "by half", "by less", "alike", "emulated", "only batched products emulated", "a little slower"],
)
def test_bfloat16_is_chosen_where_all_products_together_are_faster_by_half(measured, chosen, emulates):
    assert (measured.chosen, measured.emulates) == (chosen, emulates)


def test_the_gain_is_that_of_the_time_that_a_model_takes():
    assert Rates(80, 160, 40, 80).gain == pytest.approx(2.0)
    alone = Rates(1e9, 1e9, 40, 10)  # as if linear layers took no time
    assert alone.gain == pytest.approx(0.25, rel=1e-3)


def test_the_rates_stand_in_the_reason(monkeypatch):
    monkeypatch.setattr(precision, "measure", lambda *_: Rates(98, 13.4, 43, 1.7))
    choice = choose_precision(None, "cpu")
    assert str(choice) == (
        "float32 (bfloat16 takes 11 times as long; on one core linear layers 13 GFLOP/s in bfloat16 and 98 in float32, "
        "batched products 1.7 and 43)"
    )
    assert choice.emulates


def test_shapes_are_the_models():
    llama = tiny_llama(hidden_size=512, intermediate_size=96).config
    assert Shapes.of(llama) == Shapes(hidden=512, inner=96, heads=4, kv_heads=2, head=32)
    assert Shapes.of(tiny_qwen3_moe().config).hidden == 64


def test_all_of_a_process_get_what_was_measured_once_and_threads_stay_as_they_were():
    config, threads = tiny_llama(hidden_size=256, intermediate_size=256).config, torch.get_num_threads()
    choice = choose_precision(config, "cpu")
    assert choice.rates is not None
    assert min(choice.rates.of("float32") + choice.rates.of("bfloat16")) > 0
    assert choose_precision(config, "cpu").rates is choice.rates
    assert torch.get_num_threads() == threads


def test_float32_is_measured_by_the_library_that_learners_use(monkeypatch):
    seen, before = set(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(rates, "fastest_matmul_precision", lambda: "medium")
    monkeypatch.setattr(rates._Product, "time", lambda product: seen.add(torch.get_float32_matmul_precision()) or 1.0)
    measure(Shapes(), seconds=0)
    assert seen == {"medium"}
    assert torch.get_float32_matmul_precision() == before


def test_nothing_is_measured_for_layers_too_narrow_to_matter(monkeypatch):
    monkeypatch.setattr(precision, "measure", None)
    choice = choose_precision(tiny_llama().config, "cpu")
    assert (choice.precision, choice.rates, choice.emulates) == ("float32", None, False)


@pytest.mark.parametrize(("has", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_computes_in_bfloat16_where_it_has_units_for_it(monkeypatch, has, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
    choice = choose_precision(None, "cuda")
    assert (choice.precision, choice.emulates) == (chosen, not has)


def test_a_gpu_of_another_machine_is_taken_to_have_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_precision(None, "cuda").precision == "bfloat16"


def test_a_processor_without_bfloat16_is_measured_as_one():
    code = (
        "from whet.models.precision import Instructions, choose_precision as choose\n"
        "choice, here = choose(None, 'cpu'), Instructions.here()\n"
        "print(choice.precision, choice.emulates, here.instructions, here.bfloat16_products)\n"
        "print(here.oneDNN_limit, here.MKL_limit)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | OLDER, capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split() == ["float32", "True", "AVX2", "no", "AVX2", "AVX2"]


def test_the_facts_of_this_machine_are_plain_and_the_same_each_time():
    assert Instructions.here() == Instructions.here()
    assert Instructions.here().threads == torch.get_num_threads()
