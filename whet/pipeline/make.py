"""The process of a stage that is not a command of ``whet``:

python -m whet.pipeline.make rows RUN OUT FORM              the graded answers of a run as rows
python -m whet.pipeline.make random_model OUT SEED          a tiny model of random weights
python -m whet.pipeline.make random_vision_model OUT SEED   the same with a vision tower
"""

import sys
from pathlib import Path

from whet.base.errors import WhetError


def main(words: list[str]) -> None:
    if words[0] == "rows":
        from whet.lineage.exports import of_answers
        from whet.prep.rollouts import Form, write_rows

        form: Form = next(form for form in Form.__args__ if form == words[3])  # type: ignore[attr-defined]
        run, rows = Path(words[1]), Path(words[2])
        print(write_rows(run, rows, form))
        of_answers(run, rows).write(rows.parent)
        return
    from whet.models.tiny import save_tiny_model
    from whet.models.tiny_vision import save_tiny_vision_model

    save = save_tiny_vision_model if words[0] == "random_vision_model" else save_tiny_model
    save(Path(words[1]), seed=int(words[2]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WhetError as error:
        sys.exit(f"error: {error}")
