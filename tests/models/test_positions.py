"""Positions of three numbers in a forest of segments, against transformers' own on each path."""

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from whet.models.image_processor import grid_positions

GRIDS = [(2, 3), (4, 1), (1, 1)]
# Parent, and content: a number of tokens of text, or the name of an image.
SEGMENTS: list[tuple[int, list[int | str]]] = [
    (-1, [2, "0", 3]),
    (0, [1, "1", 2, "0", 1]),
    (1, [4]),
    (1, [2, "2", 1]),
    (0, [5]),
    (-1, [1, "1", 1]),
]


def test_positions_are_those_of_each_path_alone() -> None:
    start, parent, image, row, place, paths = list[int](), list[int](), list[int](), list[int](), list[int](), []
    for above, content in SEGMENTS:
        start.append(len(image))
        parent.append(above)
        for part in content:
            height, width = (1, part) if isinstance(part, int) else GRIDS[int(part)]
            image += [int(part) if isinstance(part, str) else -1] * (height * width)
            row += range(height * width) if isinstance(part, str) else [0] * (height * width)
        own = list(range(start[-1], len(image)))
        paths.append([*(paths[above] if above >= 0 else []), *own])
        place += range(len(paths[-1]) - len(own), len(paths[-1]))
    ours = grid_positions(torch.tensor(place), start, parent, torch.tensor(image), torch.tensor(row), GRIDS)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(
            AutoConfig.for_model("qwen2_5_vl", vision_config={"depth": 1}, text_config={"num_hidden_layers": 1})
        ).model
    merged = model.config.vision_config.spatial_merge_size
    for path in paths:
        kinds = torch.tensor([int(image[token] >= 0) for token in path])
        seen = [GRIDS[image[token]] for token in path if image[token] >= 0 and row[token] == 0]
        sizes = torch.tensor([(1, merged * height, merged * width) for height, width in seen])
        theirs, _ = model.get_rope_index(kinds[None], kinds[None], image_grid_thw=sizes)
        assert torch.equal(ours[:, path], theirs[:, 0])
