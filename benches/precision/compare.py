"""Losses of several runs side by side: compare.py OUT REFERENCE RUN..., where OUT/RUN is a run folder.

Writes OUT/losses.json and prints, for each run, the largest difference from the reference and its step.
"""

import json
import pathlib
import sys


def losses(run: pathlib.Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    if steps != list(range(1, len(steps) + 1)):
        sys.exit(f"{run}: expected steps 1 to {len(steps)}, each once")
    return [line["loss"] for line in lines]


def main() -> None:
    out, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    runs = {name: losses(out / name) for name in names}
    reference = runs[names[0]]
    for name, found in runs.items():
        if len(found) != len(reference):
            sys.exit(f"{name}: {len(found)} steps, expected {len(reference)}")
        differences = [abs(a - b) for a, b in zip(found, reference)]
        worst = max(range(len(found)), key=differences.__getitem__)
        print(f"{name}: first loss {found[0]:.6f}, last {found[-1]:.6f}, "
              f"at most {differences[worst]:.2e} from {names[0]} (step {worst + 1})")
    (out / "losses.json").write_text(json.dumps(runs))


main()
