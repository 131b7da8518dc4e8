#!/usr/bin/env python3
"""Predicts step times on more GPUs than were measured, from measured parts.

    benches/scaling/simulate.py RESULTS.jsonl [--plot OUT.svg] [--check]

A step of N GPUs in islands of eight (NVLink inside, a link of 400 Gb/s between islands for each GPU, or one for each island) takes

    step(s) - U (1 - 1/N) + sums that the backward pass does not hide + gathering

`step(s)`: the time of one GPU for s samples, measured for 1 to 32, a straight line beyond and between. `U`: the update of all parameters by one GPU; each of N updates its share. Sums: buckets of
16 MiB become ready at even times in the backward pass of the last microbatch (two thirds of its time) and are summed one after the other, each in L + S (N - 1) / N / R inside an
island, where L and R are of the measured rates of buckets of 16 MiB and 1 GiB; across H islands a bucket's S (H - 1) / H more bytes cross the network, an eighth for each GPU where each has a link, while the
next bucket is summed inside. Gathering: 2 bytes a parameter, (N - 1) / N of them to each GPU, into an island once. Where parameters are sharded, blocks are gathered before each microbatch's passes instead, inside an island,
beside the products of the block before: what that costs a microbatch is measured on two GPUs with 8 samples each, and is (N - 1) / N of twice as much on N of an island.
Between islands a message takes 10 microseconds, and a long one gets NETWORK_SHARE of the link's rate: these two are assumptions, all else is measured.

--check: every measured step of several GPUs is within 5 % of what the parts of one GPU and of sums predict. --plot: weak and strong scaling to 1,024 GPUs, beside the
strong scaling that LLM Foundry published (MPT-7B on MI250: 166 TFLOP/s a GPU on 4, 159 on 128, the same global batch).
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys

from jobs import MODELS, SEQUENCE, STRONG_SAMPLES, Model, counts, finished

ISLAND = 8
BUCKET_BYTES = 16 << 20
# 400 Gb/s in bytes, the share of it that a long message gets, and the latency of a message in seconds.
LINK_BYTES_PER_SECOND = 50e9
NETWORK_SHARE = 0.9
NETWORK_LATENCY = 10e-6
# Samples of a step of MPT-7B in the published run's class: 4 million tokens.
FOUNDRY_SAMPLES = 2048
FOUNDRY = {4: 166.0, 128: 159.0}
MOST = 1024


@dataclasses.dataclass
class Sums:
    """The time of a bucket inside an island: `latency + received / rate`, summed and gathered."""

    summed: tuple[float, float]
    gathered: tuple[float, float]

    @staticmethod
    def measured(result: dict) -> "Sums":
        rows = {row["bucket_mebibytes"]: row for row in result["buckets"]}
        share = (result["workers"] - 1) / result["workers"]

        def line(rate: str) -> tuple[float, float]:
            long, bucket = rows[1024][rate] * 1e9, rows[16][rate] * 1e9
            received = BUCKET_BYTES * share
            return max(0.0, received / bucket - received / long), long

        return Sums(line("summed_gigabytes_per_second"), line("gathered_gigabytes_per_second"))


@dataclasses.dataclass
class Parts:
    """The measurements of a model on one GPU."""

    model: Model
    parameters: int
    # Seconds of a step, by samples.
    steps: dict[int, float]
    # Seconds in which one GPU updates all parameters.
    update: float
    # Additional seconds of a microbatch on two GPUs with sharded parameters.
    gathered: float = 0.0

    def step(self, samples: float) -> float:
        known = sorted(self.steps)
        low = max([one for one in known[:-1] if one <= samples], default=known[0])
        high = known[known.index(low) + 1]
        slope = (self.steps[high] - self.steps[low]) / (high - low)
        return self.steps[low] + slope * (samples - low)

    def predict(self, gpus: int, samples: float, sums: Sums, shard: str, links: int = ISLAND) -> float:
        """Seconds of a step of `samples` a GPU on `gpus`; an island has `links` to the network."""
        if gpus == 1:
            return self.step(samples)
        inside, islands = min(gpus, ISLAND), max(1, gpus // ISLAND)
        buckets = -(-4 * self.parameters // BUCKET_BYTES)
        crossing = (islands - 1) / islands / links / (NETWORK_SHARE * LINK_BYTES_PER_SECOND)
        far = NETWORK_LATENCY if islands > 1 else 0.0
        latency, rate = sums.summed
        near = latency + BUCKET_BYTES * (inside - 1) / inside / rate
        bucket = max(near, BUCKET_BYTES * crossing + far)
        microbatch = min(self.model.grain_samples * self.model.microbatch_grains, samples)
        # The time of the last microbatch: the whole step if it is the only one.
        last = self.step(samples) - (self.step(samples - microbatch) if samples > microbatch else 0.0)
        backward = 2 / 3 * last
        done = 0.0
        for index in range(buckets):
            done = max(done, backward * (index + 1) / buckets) + bucket
        exposed = done - backward + far
        latency, rate = sums.gathered
        # bf16 parameters of the other ranks, bucket by bucket.
        part = BUCKET_BYTES / 2
        gathering = buckets * max(latency + part * (inside - 1) / inside / rate, part * crossing + far)
        if shard == "parameters":
            microbatches = samples / microbatch
            gathering = self.gathered * microbatches * 2 * (inside - 1) / inside
            # Into an island once a step.
            gathering += buckets * part * crossing
        return self.step(samples) - self.update * (1 - 1 / gpus) + exposed + gathering


def parts_of(model: Model, done: dict[str, dict]) -> Parts | None:
    """The parts from the measurements on one GPU."""
    steps, parameters = {}, 0
    for samples in (1, 2, 4, 8, 32):
        if line := done.get(f"{model.preset} 1 weak {samples}"):
            result = line["result"][-1]
            steps[samples], parameters = result["step_milliseconds"] / 1e3, result["parameters"]
    profile = done.get(f"{model.preset} 1 profile 8")
    if len(steps) < 2 or not profile:
        return None
    kernels = profile["result"][-1]["profile"]
    update = sum(row["milliseconds"] for row in kernels if row["kernel"].startswith("adamw")) / 1e3
    parts = Parts(model, parameters, steps, update)
    two = done.get(f"{model.preset} 2 weak 8")
    if model.shard == "parameters" and two:
        longer = two["result"][-1]["step_milliseconds"] / 1e3 - steps[8] + update / 2
        parts.gathered = longer * model.grain_samples * model.microbatch_grains / 8
    return parts


def measured(model: Model, done: dict[str, dict], gpus: int):
    """Name, samples a GPU and seconds of each measured step."""
    for what, samples in (("weak 32", 32), ("weak 8", 8), (f"strong {STRONG_SAMPLES}", STRONG_SAMPLES / gpus)):
        if line := done.get(f"{model.preset} {gpus} {what}"):
            yield what, samples, line["result"][-1]["step_milliseconds"] / 1e3


def compare(all_parts: list[Parts], done: dict[str, dict], sums: dict[int, Sums]) -> bool:
    """Prints measured and predicted rates; returns whether all agree within 5 %."""
    within = True
    print("| model | GPUs | samples | measured, tokens/s a GPU | of one | predicted | |")
    print("|---|---|---|---|---|---|---|")
    for parts, gpus in itertools.product(all_parts, [1, *sorted(sums)]):
        for what, samples, seconds in measured(parts.model, done, gpus):
            predicted = parts.predict(gpus, samples, sums.get(gpus), parts.model.shard)
            rate, off = samples * SEQUENCE / seconds, predicted / seconds - 1
            alone = samples * SEQUENCE / parts.step(samples)
            within &= abs(off) <= 0.05
            print(
                f"| {parts.model.preset} | {gpus} | {what} | {rate:,.0f} | {rate / alone:.3f} | {samples * SEQUENCE / predicted:,.0f} | {100 * off:+.1f} % |"
            )
    return within


def scaled(parts: Parts, sums: Sums, links: int, samples_of) -> list[tuple[int, float]]:
    """Tokens a second of a GPU relative to eight GPUs, by number of GPUs."""

    def rate(gpus: int) -> float:
        samples = samples_of(gpus)
        return samples / parts.predict(gpus, samples, sums, parts.model.shard, links)

    numbers = [2**power for power in range(3, MOST.bit_length())]
    return [(gpus, rate(gpus) / rate(ISLAND)) for gpus in numbers]


CASES = [
    ("weak, 32 samples a GPU", lambda gpus: 32),
    ("weak, 8 samples a GPU", lambda gpus: 8),
    (f"strong, {FOUNDRY_SAMPLES} samples a step", lambda gpus: FOUNDRY_SAMPLES / gpus),
]


def tables(all_parts: list[Parts], sums: Sums) -> None:
    print(f"\nTokens a second of a GPU, of what each of {ISLAND} has; a link for each GPU, and one for each island:\n")
    print("| model | | " + " | ".join(str(2**power) for power in range(4, MOST.bit_length())) + " |")
    print("|---" * (MOST.bit_length() - 2) + "|")
    for parts, (name, samples_of) in itertools.product(all_parts, CASES):
        both = zip(scaled(parts, sums, ISLAND, samples_of)[1:], scaled(parts, sums, 1, samples_of)[1:])
        cells = [f"{each:.2f}, {one:.2f}" for (_, each), (_, one) in both]
        print(f"| {parts.model.preset} | {name} | " + " | ".join(cells) + " |")


def plot(all_parts: list[Parts], sums: Sums, out: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # The same plot gives the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CASES), sharey=True, figsize=(13, 4.2), layout="constrained")
    for axis, (name, samples_of) in zip(axes, CASES):
        for index, parts in enumerate(all_parts):
            for links, style in ((ISLAND, "-"), (1, ":")):
                line = scaled(parts, sums, links, samples_of)
                label = parts.model.preset if links == ISLAND else None
                axis.plot(*zip(*line), style, color=f"C{index}", marker=".", label=label)
        if name.startswith("strong"):
            base = FOUNDRY[4]
            axis.plot(
                *zip(*[(gpus, rate / base) for gpus, rate in FOUNDRY.items()]),
                "--x",
                color="grey",
                label="LLM Foundry, MPT-7B on MI250\n(measured; of 4 GPUs)",
            )
        axis.set_xscale("log", base=2)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("GPUs")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s of a GPU, of what each of 8 has")
    axes[0].set_ylim(0, 1.05)
    axes[-1].legend(fontsize=8, loc="lower left")
    figure.suptitle(
        "Simulated: solid, 400 Gb/s for each GPU between islands of eight; dotted, for each island", fontsize=10
    )
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, metavar="OUT.svg")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    done = finished(arguments.results)
    all_parts = [parts for model in MODELS if (parts := parts_of(model, done))]
    sums = {
        gpus: Sums.measured(line["result"][-1]) for gpus in counts(ISLAND) if (line := done.get(f"sums {gpus} threads"))
    }
    if not all_parts or not sums:
        sys.exit(f"{arguments.results}: expected steps of one GPU and sums of several; run.sh measures them")
    within = compare(all_parts, done, sums)
    most = sums[max(sums)]
    tables(all_parts, most)
    if arguments.plot:
        plot(all_parts, most, arguments.plot)
    if arguments.check and not within:
        sys.exit("a prediction is off by more than 5 %")


main()
