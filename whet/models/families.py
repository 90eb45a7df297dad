"""A check of every loaded model: with whet's layout it must give the same result as on each sequence alone. An
architecture may look ahead, or have its own masks or positions."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.core.batch import Batch
from whet.core.content import only_images
from whet.core.types import Episode, Group, Message, Span, Task, Trajectory
from whet.models.attention.forest import decoder_of, forest_hidden, supports_forest, use_forest_attention
from whet.models.attention.states import supports_prefix_fork
from whet.models.head import check_finite
from whet.models.image_processor import ImageProcessor
from whet.models.images import embedded, of_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = 1e-3  # of the largest hidden state
PICTURE = (  # 12 x 8 pixels in four colours
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAwAAAAIAgMAAACwivZiAAAADFBMVEXIHh4UoDwoPNzw8PBtbUi1AAAAHUlEQVR42mNkCA1lYmBg"
    "YGJgYGBY9Z8BxmaEigMANroDCp2N8mMAAAAASUVORK5CYII="
)


@torch.no_grad()
def select_attention(model: "PreTrainedModel", images: ImageProcessor | None = None, *, check: bool = True) -> bool:
    """Select forest attention if the architecture supports it; return whether prompts can be shared, with forest
    attention or by copies of states. ``check`` compares hidden states with the unmodified model's on a few tokens, and
    on an image if there is a processor of ``images``, which needs weights. Raises ``WhetError`` if they differ."""
    forest = supports_forest(model.config)
    shares = forest or supports_prefix_fork(model.config)
    if check:
        training, precision = model.training, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            wrong = _difference(model.eval(), forest, shares, images)
        finally:
            torch.set_float32_matmul_precision(precision)
            model.train(training)
        if wrong:
            raise WhetError(f"{type(model).__name__} can't be trained: {wrong}; this architecture is not supported yet")
    if forest:
        use_forest_attention(model)
    return shares


def _difference(model: "PreTrainedModel", forest: bool, shares: bool, images: ImageProcessor | None) -> str:
    """Return a description of the difference between the states of two answers to one prompt and the states of each
    sequence alone; empty if there is none."""
    vocabulary = model.get_input_embeddings().num_embeddings
    prompt, *replies = ([token % vocabulary for token in row] for row in ([3, 4, 5, 6, 7], [9, 8], [13, 12, 11, 10]))
    messages: list[Message] = []
    if images is not None:
        messages = only_images([PICTURE])
        prompt = [*prompt[:2], *images.tokens(PICTURE), *prompt[2:]]
    answers = [Trajectory([Span(prompt, False), Span(reply, True)], messages) for reply in replies]
    batch = Batch.from_groups(
        [Group("", Task("", []), [Episode([answer]) for answer in answers])], share_prompts=shares
    )
    try:
        alone = torch.cat([_alone(model, answer, images) for answer in answers])
        if forest:
            use_forest_attention(model)
        inputs = None if images is None else embedded(model, batch, images)
        states = forest_hidden(model, batch, embedded=inputs)[batch.trained]
    except Exception as error:  # an unknown architecture may raise any error
        what = "tokens alone" if images is None else "tokens and an image"
        return f"it can't be run on {what} ({type(error).__name__}: {error})"
    check_finite(alone, model)
    if float((states - alone).abs().max()) <= _TOLERANCE * float(alone.abs().max()):
        return ""
    layout = "with shared prompts" if shares else "as padded rows"
    also = "" if images is None else ", or use an image in other ways than as embeddings"
    return (
        f"run {layout}, its hidden states differ from each sequence's alone (it may attend to later tokens, or "
        f"count positions differently{also})"
    )


def _alone(model: "PreTrainedModel", answer: Trajectory, images: ImageProcessor | None) -> Tensor:
    weight = model.get_input_embeddings().weight
    if images is None:
        tokens = torch.tensor([answer.tokens], device=weight.device)
        states: Tensor = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state[0]
    else:
        tokens = torch.tensor([images.marked(answer.tokens)], device=weight.device)
        more = images.inputs(PICTURE) | images.kinds(PICTURE, answer.tokens)
        seen: dict[str, Any] = {}
        hook = decoder_of(model).register_forward_hook(lambda _, __, output: seen.update(output=output))
        try:
            model(input_ids=tokens, use_cache=False, **of_dtype(more, weight))
        finally:
            hook.remove()
        states = seen["output"].last_hidden_state[0]
    return states[-answer.trained_tokens :]
