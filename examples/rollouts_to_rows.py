"""Write a run's graded answers as rows to learn from: pairs of a right and a wrong answer to the same task, right
answers alone, or every answer with a score of 1 or 0. An answer that calls an undeclared tool counts as wrong.

    whet train quickstart optimizer.lr=0 --folder runs/sample        # a learning rate of 0 only samples
    python examples/rollouts_to_rows.py runs/sample pairs.jsonl
"""

import argparse
from pathlib import Path

from whet.base.errors import WhetError
from whet.prep.rollouts import write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that sampled")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--form", choices=["pairs", "texts", "scored"], default="pairs")
    arguments = parser.parse_args()
    try:
        print(write_rows(arguments.run, arguments.out, arguments.form))
    except WhetError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
