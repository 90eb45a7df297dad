"""Images in a model: hidden states, log-probs and gradients as in transformers' own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import is_torchvision_available

from tests.grids import grid
from tests.tiny import tiny_tokenizer
from tests.tiny_vision import FAMILIES, Family, asked, picture, save_tiny_vision, saved_families
from whet.base.errors import DataError, WhetError
from whet.chat.renderer import Renderer
from whet.core.batch import Batch
from whet.core.images import placeholders
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.fetch.images import open_image
from whet.learner.model import LearnerModel, build_whole
from whet.models.attention.layout import ahead_in_runs
from whet.models.config import LoraSettings, ModelConfig
from whet.models.image_processor import load_processor
from whet.models.loading import load_images, load_model, load_model_config, load_tokenizer

RED, BLUE, TALL = picture("red"), picture("blue"), picture("green", 20, 40)
CPU = torch.device("cpu")
WITH_TORCHVISION: tuple[Family, ...] = ("llama4",) if is_torchvision_available() else ()
ALL: tuple[Family, ...] = (*FAMILIES, "qwen3_vl_moe", *WITH_TORCHVISION)
ROUNDED = {"qwen3_5": 1e-5}  # its linear attention computes in float32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return saved_families(tmp_path_factory, ALL)


@pytest.fixture(scope="module")
def folder(folders: dict[Family, Path]) -> Path:
    return folders["idefics3"]


def renderer_of(folder: Path) -> Renderer:
    config = ModelConfig(path=str(folder), vision="trained")
    return Renderer(load_tokenizer(config), images=load_images(config))


def answered(renderer: Renderer, question: list[Message], *answers: str) -> Group:
    prompt = renderer.render_prompt(question)
    replies: list[Message] = [{"role": "assistant", "content": answer} for answer in answers]
    branches = [
        Trajectory([Span(prompt, False), Span(renderer.render_reply(question, reply), True)], [*question, reply])
        for reply in replies
    ]
    return Group(repr(answers), Task("", question), [Episode([branch], reward=1.0) for branch in branches])


def processed(processor: Any, branch: Trajectory) -> Any:
    """Return the inputs of transformers' own code for a conversation alone, in float64."""
    written = [
        message | {"content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
        for message in branch.messages
        for content in [message["content"]]
    ]
    text = processor.tokenizer.apply_chat_template(written, tokenize=False)
    pictures = [open_image(part["url"]) for m in branch.messages for part in m["content"] if "url" in part]
    inputs = processor(text=text, images=pictures or None, add_special_tokens=False, return_tensors="pt")
    if pictures:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    return inputs


def theirs(folder: Path, processor: Any, group: Group) -> list[torch.Tensor]:
    """Return the log-probs of each answer by transformers' own forward pass over the conversation alone, and leave
    the gradients of their sum in the model."""
    model = theirs_model(folder)
    rows = []
    for branch in group.trajectories:
        inputs = processed(processor, branch)
        logits = model(**inputs).logits[0].log_softmax(-1)
        ids, count = inputs["input_ids"][0], branch.trained_tokens
        end = len(branch.tokens)
        rows.append(logits[end - count - 1 : end - 1].gather(1, ids[end - count : end, None])[:, 0])
    torch.cat(rows).sum().backward()
    return [row.detach() for row in rows]


_MODELS: dict[Path, Any] = {}


def theirs_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    if folder not in _MODELS:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
        if hasattr(model.config.get_text_config(), "num_experts"):
            model.set_experts_implementation("eager")  # grouped products don't take float64
        _MODELS[folder] = model.eval()
    _MODELS[folder].zero_grad()
    return _MODELS[folder]


@pytest.mark.parametrize(("family", "share"), grid(ALL, [True, False]))
def test_log_probs_and_gradients_are_those_of_transformers(
    folders: dict[Family, Path], family: Family, share: bool
) -> None:
    path = folders[family]
    processor, renderer = load_processor(path, load_model_config(ModelConfig(path=str(path)))), renderer_of(path)
    groups = [
        answered(renderer, [asked(RED)], "red", "red and white"),
        answered(renderer, [asked(BLUE)], "blue", "none"),
        answered(renderer, [asked(RED, TALL, RED, text="Which differs?")], "the second"),
        answered(renderer, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "Hello"),
    ]
    model = build_whole(ModelConfig(path=str(path), vision="trained"), "float64", True, False, 0, CPU).eval()
    for group in groups[:-1]:
        wanted = theirs(path, processor, group)
        oracle = {name: p.grad for name, p in theirs_model_gradients(path)}
        model.zero_grad()
        batch = Batch.from_groups([group], share_prompts=share)
        output = model(batch, frozenset())
        output.logprobs.sum().backward()
        close = {"rtol": ROUNDED[family], "atol": ROUNDED[family]} if family in ROUNDED else {}
        torch.testing.assert_close(output.logprobs[batch.trained_tokens].detach(), torch.cat(wanted), **close)
        found = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
        assert any("vis" in name and "patch_embed" in name for name in found)
        for name, gradient in found.items():
            far = 1e-5 if family in ROUNDED or family.startswith("gemma") else 1e-6  # norms round to float32
            torch.testing.assert_close(
                gradient, oracle[name], msg=lambda text, name=name: f"{name}: {text}", rtol=10 * far, atol=far
            )
    whole, parts = Batch.from_groups(groups, share_prompts=share), []
    together = model(whole, frozenset()).logprobs
    for sequence in range(whole.sequences):
        part, tokens = whole.select(torch.tensor([sequence]))
        assert set(part.images) == {url for url in whole.images if url in repr(groups[int(whole.group[sequence])])}
        parts.append(model(part, frozenset()).logprobs[part.trained])
        torch.testing.assert_close(parts[-1], together[tokens[part.trained]], **close)


def theirs_model_gradients(folder: Path) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in _MODELS[folder].named_parameters() if p.grad is not None]


def test_prompts_with_different_images_share_only_what_is_before_them(folder: Path) -> None:
    renderer = renderer_of(folder)
    red, blue = (renderer.render_prompt([asked(url)]) for url in (RED, BLUE))
    first = next(index for index, token in enumerate(red) if token < 0)
    assert red[:first] == blue[:first]
    assert red[first] != blue[first]
    assert len(red) == len(blue)
    assert renderer.render_prompt([asked(RED)]) == red
    same = Batch.from_groups([answered(renderer, [asked(RED)], "a", "b")])
    other = answered(renderer, [asked(RED)], "a")
    other.episodes += answered(renderer, [asked(BLUE)], "b").episodes
    assert len(Batch.from_groups([other])) > len(same)
    assert len(same.images) == 1
    assert same.image is not None
    assert int((same.image >= 0).sum()) == 4


def test_placeholders_are_below_the_ids_that_mean_something() -> None:
    ids = placeholders(RED, 9)
    assert max(ids) < -1
    assert min(ids) >= -(2**31)
    assert ids[:4] == ids[4:8]
    assert len(set(ids)) == 4


def test_an_image_that_the_messages_lack_is_an_error(folder: Path) -> None:
    group = answered(renderer_of(folder), [asked(RED)], "red")
    group.episodes[0].branches[0].messages[:] = [asked(BLUE)]
    with pytest.raises(DataError, match="stands for an image that the messages of its conversation don't have"):
        Batch.from_groups([group])


def test_a_model_without_vision_refuses_a_batch_with_images(folder: Path) -> None:
    batch = Batch.from_groups([answered(renderer_of(folder), [asked(RED)], "red")])
    model = build_whole(ModelConfig(path=str(folder), vision="trained"), "float32", False, False, 0, CPU)
    blind = LearnerModel(model.model, None, "float32")
    with pytest.raises(WhetError, match=r"the batch has images, and the model reads none; set model\.vision"):
        blind(batch, frozenset())


def test_a_part_of_an_image_is_an_error(folder: Path) -> None:
    group = answered(renderer_of(folder), [asked(RED)], "red")
    span = group.episodes[0].branches[0].spans[0]
    last = max(index for index, token in enumerate(span.tokens) if token < 0)
    span.tokens = [*span.tokens[:last], *span.tokens[last + 1 :]]
    model = build_whole(ModelConfig(path=str(folder), vision="trained"), "float32", False, False, 0, CPU)
    with pytest.raises(DataError, match="an image of 4 tokens has 3 places among the tokens: it was cut"):
        model(Batch.from_groups([group]), frozenset())


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma3", "gemma4"])
def test_a_frozen_tower_learns_nothing_and_the_layers_after_it_do(folders: dict[Family, Path], family: Family) -> None:
    folder = folders[family]
    model = build_whole(ModelConfig(path=str(folder), vision="frozen"), "float32", True, False, 0, CPU)
    model(
        Batch.from_groups([answered(renderer_of(folder), [asked(RED)], "red")]), frozenset()
    ).logprobs.sum().backward()
    trained = {name for name, parameter in model.by_name() if parameter.grad is not None}
    assert not any("vision_model" in name or "visual" in name or "vision_tower" in name for name in trained)
    between = any(part in name for name in trained for part in ("connector", "projector", "embed_vision"))
    assert between == (family != "qwen3_vl")  # Qwen's tower has them inside
    assert any(".layers." in name for name in trained)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_without_images_everything_outside_of_the_decoder_has_gradients_of_zero(
    folders: dict[Family, Path], family: Family
) -> None:
    model = build_whole(ModelConfig(path=str(folders[family]), vision="trained"), "float32", True, False, 0, CPU)
    text = answered(renderer_of(folders[family]), [{"role": "user", "content": "Hi"}], "Hello")
    model(Batch.from_groups([text]), frozenset()).logprobs.sum().backward()
    zero = {name for name, p in model.by_name() if p.grad is not None and not p.grad.any()}
    assert all(p.grad is not None for _, p in model.by_name() if p.requires_grad)
    tower = {name for name, _ in model.by_name() if "vision_model" in name or "visual" in name}
    assert tower
    assert tower <= zero
    assert any(".layers." in name for name, _ in model.by_name() if name not in zero)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl_moe"])
def test_adapters_are_in_the_decoder_only(folders: dict[Family, Path], family: Family) -> None:
    config = ModelConfig(path=str(folders[family]), vision="trained", lora=LoraSettings(rank=2))
    names = {name for name, p in load_model(config, dtype=torch.float32).named_parameters() if p.requires_grad}
    assert names
    assert all("text_model" in name or "language_model" in name for name in names)


def test_a_model_whose_tokens_see_others_than_whet_thinks_is_refused(
    folders: dict[Family, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(path=str(folders["gemma3"]), vision="trained")
    monkeypatch.setattr(load_images(config), "looks_ahead", None)
    with pytest.raises(WhetError, match=r"Gemma3\w+ can't be trained: .* \(it may attend to later tokens"):
        load_model(config, dtype=torch.float32)


@pytest.mark.parametrize(("family", "everywhere"), [("gemma3", True), ("gemma4", False)])
def test_the_first_token_of_an_image_reads_its_last_one_in_some_layers(
    folders: dict[Family, Path], family: Family, everywhere: bool
) -> None:
    config = ModelConfig(path=str(folders[family]), vision="trained")
    tokens = [*range(3, 8), *load_images(config).tokens(RED), 9, 10]
    of_image = torch.tensor(tokens) < 0
    count = ahead_in_runs(of_image, [0, len(tokens) - 1])
    first, size = int(of_image.nonzero()[0]), int(of_image.sum())
    assert count[first : first + size].tolist() == list(reversed(range(size)))
    assert int(count.sum()) == size * (size - 1) // 2
    assert load_images(config).looks_ahead == ("everywhere" if everywhere else "in windows")


def test_runs_of_image_tokens_end_where_their_segment_ends() -> None:
    of_image = torch.tensor([True, True, False, True, True, True, False, True])
    assert ahead_in_runs(of_image, [0, 5, 7]).tolist() == [1, 0, 0, 1, 0, 0, 0, 0]


def test_a_model_without_a_processor_is_refused(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(WhetError, match=r"^model\.vision: "):
        load_images(ModelConfig(path=str(tmp_path), vision="frozen"))


def test_messages_with_images_need_a_processor_of_images() -> None:
    with pytest.raises(DataError, match="message 1 has an image, where only text can be read"):
        Renderer(tiny_tokenizer()).render_prompt([asked(RED)])


def test_a_template_that_writes_no_image_is_refused(folder: Path) -> None:
    config = ModelConfig(path=str(folder), vision="trained")
    blind = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    blind += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    blind += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = Renderer(load_tokenizer(config), blind, images=load_images(config))
    with pytest.raises(DataError, match="writes 0 marks of images for 1 images"):
        renderer.render_prompt([asked(RED)])


def test_text_that_spells_the_mark_of_an_image_is_text(folder: Path) -> None:
    renderer = renderer_of(folder)
    tokens = renderer.render_prompt([asked(RED, text="What is <image>?")])
    assert sum(token < 0 for token in tokens) == 4
    assert load_images_mark(folder) not in tokens
    assert "What is <image>?" in renderer.decode(tokens)


def load_images_mark(folder: Path) -> int:
    return load_images(ModelConfig(path=str(folder), vision="trained")).mark


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_folded_into_marks_and_images_in_their_order(folders: dict[Family, Path], family: Family) -> None:
    renderer = renderer_of(folders[family])
    images: Any = renderer.images
    question = [asked(BLUE, RED, BLUE), {"role": "assistant", "content": "Blue"}, asked(TALL)]
    prompt = renderer.render_prompt(question)
    text, found = images.folded(prompt, [RED, TALL, BLUE])
    assert found == [BLUE, RED, BLUE, TALL]
    unfolded, following = [], iter(found)
    for token in text:
        unfolded += images.tokens(next(following)) if token == images.mark else [token]
    assert unfolded == prompt
    with pytest.raises(DataError, match="it was cut"):
        images.folded(prompt[: max(place for place, token in enumerate(prompt) if token < 0)], [RED, TALL, BLUE])
