"""Rows per second and peak memory of ``whet prep`` next to ``datasets`` (load, map, filter, to_json) on the same work:
rows of JSONL become messages, exact duplicates are dropped, the rest is split and written.

    python benchmarks/prep.py --rows 200000
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WHET = """
import sys
from pathlib import Path
from whet.config import load
from whet.prep.config import PrepConfig
from whet.prep.prepare import prepare
manifest = prepare(load(PrepConfig, sys.argv[1] + "/blend.yaml").value, Path(sys.argv[1]) / "whet")
print(sum(manifest.rows(split) for split in manifest.splits))
"""
DATASETS = """
import hashlib, sys
from datasets import load_dataset
folder, seen = sys.argv[1], set()

def messages(row):
    asked = {"role": "user", "content": row["prompt"]}
    return {"messages": [asked, {"role": "assistant", "content": row["completion"]}], "source": "rows"}

def is_new(row):
    text = " ".join("".join(message["content"] for message in row["messages"]).lower().split())
    key, size = hashlib.blake2b(text.encode(), digest_size=16).digest(), len(seen)
    seen.add(key)
    return len(seen) > size

rows = load_dataset("json", data_files=f"{folder}/rows.jsonl", split="train", cache_dir=f"{folder}/cache")
rows = rows.map(messages, remove_columns=["prompt", "completion"]).filter(is_new)
parts = rows.train_test_split(test_size=0.02, seed=0)
for name, part in parts.items():
    part.to_json(f"{folder}/datasets-{name}.jsonl")
print(sum(len(part) for part in parts.values()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with (folder / "rows.jsonl").open("w") as file:
            for i in range(count):
                number = i % (count - count // 50)  # a fiftieth are duplicates
                words = " ".join(str(number * j % 997) for j in range(40))
                file.write(json.dumps({"prompt": f"Question {number}: {words}", "completion": words}) + "\n")
        source = {"rows": {"type": "supervised", "path": str(folder / "rows.jsonl")}}
        (folder / "blend.yaml").write_text(json.dumps({"sources": {"rows": source}}))
        before = 0.0
        for name, program in (("whet prep", WHET), ("datasets", DATASETS)):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", program, scratch], capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of the largest child so far
            kept = done.stdout.split()[-1]
            note = "" if peak > before else " or less"
            print(f"{name:<10} {count / seconds:9,.0f} rows/s  {peak:6,.0f} MiB{note}  {kept} rows kept")
            before = peak


if __name__ == "__main__":
    main()
