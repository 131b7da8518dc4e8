"""Plots the losses of run.sh: plot.py LOSSES.json OUT.svg. Needs matplotlib."""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # noqa: E402 (the backend is chosen first)


def main() -> None:
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text())
    (reference, expected), *others = runs.items()
    steps = range(1, len(expected) + 1)
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    for index, (name, losses) in enumerate(runs.items()):
        above.plot(steps, losses, label=name, linewidth=3 - 0.6 * index, alpha=0.8)
    above.set_ylabel("loss (nats)")
    above.legend()
    for index, (name, losses) in enumerate(others, start=1):
        difference = [max(abs(a - b), 1e-9) for a, b in zip(losses, expected)]
        below.plot(steps, difference, color=f"C{index}", label=f"{name} - {reference}")
    for bound, what in [(1e-3, "fp32 bound"), (2e-2, "bf16 bound")]:
        below.axhline(bound, color="grey", linewidth=0.8, linestyle="--")
        below.text(1, bound * 1.15, what, color="grey", fontsize=8)
    below.set_yscale("log")
    below.set_ylabel("difference (nats)")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(sys.argv[2])


main()
