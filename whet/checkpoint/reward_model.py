"""Converts a trained reward model to a sequence classifier of transformers with one label: the same model, with the
scalar head as its ``score``, and a padding token that never ends a conversation. Where transformers has no such class,
the checkpoint has the form of its other classifiers (``models/sequence_classifier.py``). Independent of losses and run
folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import WhetError
from whet.checkpoint.manifest import CheckpointError
from whet.checkpoint.policy import copy_into

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from whet.chat.renderer import Renderer
    from whet.models.config import ModelConfig
    from whet.models.image_processor import ImageProcessor

ROLE = "reward_model"
HEAD = "value_head.linear.weight"


def load_reward_model(folder: Path, config: "ModelConfig") -> "PreTrainedModel":
    """Return the reward model in a checkpoint's ``folder``, on the CPU in float32 with LoRA merged, as a sequence
    classifier.

    Raises ``CheckpointError`` if its tensors do not match the model's, ``WhetError`` if a classifier of this
    architecture doesn't give its scores.
    """
    import torch

    from whet.learner.state import load_weights
    from whet.models.loading import load_images, load_model
    from whet.models.quantized import dequantize

    path = folder / ROLE
    tensors = load_weights(path, None if config.lora is None else config.lora.unseen)
    head = tensors.pop(HEAD, None)
    if head is None:
        raise CheckpointError(f"{path} has no {HEAD}, so this version can't read it as a reward model")
    model: Any = load_model(config, dtype=torch.float32, train=True)
    dequantize(model)
    output = model.get_output_embeddings().weight
    if output is not model.get_input_embeddings().weight:
        output.requires_grad_(False)  # the learner does not train the unused head
    copy_into(model, tensors, path, partial=True)
    if config.lora is not None:
        model = model.merge_and_unload()
    images = None if config.vision is None else load_images(config)
    return _classifier(model.eval(), head.float(), images)


def choose_padding(tokenizer: "PreTrainedTokenizerBase", renderer: "Renderer", config: "ModelConfig") -> int:
    """Set the tokenizer's padding token; return its id. A classifier reads the last token that isn't padding, so
    padding must differ from the token that ends conversations. Raises ``WhetError`` where there is no such token."""
    from whet.models.images import padding_at_images
    from whet.models.loading import load_model_config

    needed = None if config.vision is None else padding_at_images(load_model_config(config))
    last = renderer.render_whole([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])[-1]
    if needed == last:
        raise WhetError(
            f"the model computes with its padding token {needed} at images, and that token ends conversations, so that "
            "a classifier would take the end for padding; set a chat_template that ends in another token"
        )
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    usual = [needed, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    free = [token for token in [*usual, *special] if token not in (None, last)]
    if not free:
        raise WhetError(
            "the tokenizer's only special token ends conversations, so none is left for padding; "
            "add one to the model's tokenizer, or set a chat_template that ends in another token"
        )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(free[0])
    tokenizer.padding_side = "right"
    return int(free[0])


def _classifier(model: "PreTrainedModel", head: "Tensor", images: "ImageProcessor | None") -> "PreTrainedModel":
    import torch

    from whet.models.attention.forest import select_in_decoder
    from whet.models.sequence_classifier import arguments_of, classifier_class, trial_rows

    settings = type(model.config).from_dict(model.config.to_dict())
    settings.num_labels, settings.problem_type = 1, "regression"
    try:
        with torch.device("meta"):  # every weight is replaced below
            classifier: Any = classifier_class(settings)._from_config(settings, dtype=torch.float32)
    except ValueError as error:
        raise WhetError(f"{type(model).__name__} can't be exported as a reward model: {error}") from None
    score = getattr(classifier, "score", None)
    if type(score) is not torch.nn.Linear or score.bias is not None or score.weight.shape != head.shape:
        raise WhetError(f"{type(classifier).__name__} can't be exported: its head is not a single linear map 'score'")
    select_in_decoder(model, settings.get_text_config()._attn_implementation)  # of transformers, not whet's
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    classifier.score = torch.nn.Linear(head.shape[1], 1, bias=False)
    classifier.score.weight = torch.nn.Parameter(head)
    classifier.eval().requires_grad_(False)
    for row in trial_rows(settings, images):
        inputs = arguments_of(row, images)
        expected = model.base_model(**inputs, use_cache=False).last_hidden_state[0, -1] @ head[0]
        score = classifier(**inputs, use_cache=False).logits[0, 0]
        if not torch.allclose(score, expected, rtol=1e-4, atol=1e-4 * float(head.norm())):
            raise WhetError(
                f"{type(classifier).__name__} scores {float(score):.6g} where the reward model scores "
                f"{float(expected):.6g}; this architecture can't be exported as a reward model yet"
            )
    return classifier
