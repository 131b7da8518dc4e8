"""A run that moves from all GPUs to three (or one) and back, killed each time, must equal a run that stays, to the bit.

Trains mamba-130m on this project's own text. Prints one line of JSON with the digests of the weights and the optimizer's state."""

import argparse
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

STEPS = 12
# Steps between checkpoints; a kill falls between two.
EVERY = 4


def settings(out: pathlib.Path) -> str:
    return f"""
[run]
dir = "{out}/stays"
seed = 17
steps = {STEPS}

[data]
dataset = "{out}/data"

[model]
preset = "mamba-130m"

[batch]
samples_per_step = 64
lanes = 16
microbatch_grains = 2

[schedule]
warmup_steps = 2
steps = {STEPS}

[device]
backend = "cuda"
precision = "bf16"

[checkpoint]
every_steps = {EVERY}
keep = 10
"""


def digests(run: pathlib.Path) -> dict[str, str]:
    """Digests of the files of the last checkpoint."""
    last = max((run / "checkpoints").iterdir(), key=lambda step: int(step.name.removeprefix("step-")))
    files = sorted(last.glob("*.safetensors"))
    if last.name.removeprefix("step-").lstrip("0") != str(STEPS) or not files:
        sys.exit(f"{last} is not the checkpoint after step {STEPS}, with its tensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--program", required=True)
    parser.add_argument("--gpus", type=int, required=True)
    arguments = parser.parse_args()
    out, program = arguments.out.resolve(), arguments.program
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    here = pathlib.Path(__file__).resolve().parents[2]
    text = ["--input", str(here), "--glob", "**/*.{md,rs}"]
    subprocess.run(
        [program, "prepare", *text, "--seq-len", "512", "--output", str(out / "data")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (out / "run.toml").write_text(settings(out))
    train = [program, "train", str(out / "run.toml")]

    def run(workers: int, *flags: str) -> None:
        subprocess.run([*train, "-w", str(workers), *flags], check=True, stdout=subprocess.DEVNULL)

    def killed_after(step: int, workers: int, *flags: str) -> None:
        """Trains until a step is reported, and then kills the process."""
        process = subprocess.Popen(
            [*train, "-w", str(workers), *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        metrics = out / "moves" / "metrics.jsonl"
        while process.poll() is None:
            steps = metrics.read_text().splitlines() if metrics.exists() else []
            if steps and json.loads(steps[-1])["step"] >= step:
                process.kill()
        process.wait()

    moves = ["--set", f"run.dir={out}/moves"]
    run(arguments.gpus)
    fewer = 3 if arguments.gpus > 3 else 1
    killed_after(5, arguments.gpus, *moves)
    killed_after(9, fewer, *moves, "--set", "parallel.shard=parameters")
    run(arguments.gpus, *moves, "--set", "parallel.shard=gradients")
    stays, moved = digests(out / "stays"), digests(out / "moves")
    print(
        json.dumps(
            {
                "workers": [arguments.gpus, fewer, arguments.gpus],
                "equal": stays == moved,
                "stays": stays,
                "moves": moved,
            }
        )
    )
    if stays != moved:
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()
