#!/usr/bin/env python3
"""The shortest possible times of the kernels of BENCHMARKS.md on AMD GPUs, beside the measured ones: computed, never run.

Reads the rows of BENCHMARKS.md for an H200: shapes, types, milliseconds and rates. A shape gives the fewest bytes that a
kernel moves, its matrix operations, and for scans and attention the exponentials and other operations. These counts must
reproduce the H200's rates, which proves that the measurements used the same counts. A floor is the longest of the times
for each count at the peaks of a data sheet.

    floors.py            prints the table
    floors.py --check    checks that BENCHMARKS.md has exactly this table
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "BENCHMARKS.md"
BEGIN, END = "<!-- floors: computed by benches/floors/floors.py -->", "<!-- end of floors -->"


@dataclass(frozen=True)
class Device:
    """Peaks: bytes and dense matrix operations a second; units times clock; and operations of a unit in one clock."""

    name: str
    bytes: float
    bf16: float
    fp32: float
    unit_clocks: float
    # Lanes of fused multiply-adds (AMD: two packed in a lane), and of exponentials.
    multiply_adds: int = 128
    exponentials: int = 16
    # Whether both run at the same time, on separate units.
    at_once: bool = False

    def seconds(self, work):
        arithmetic = work.operations / self.multiply_adds / self.unit_clocks
        exponentials = work.exponentials / self.exponentials / self.unit_clocks
        vector = max(arithmetic, exponentials) if self.at_once else arithmetic + exponentials
        matrix = work.matrix / (self.bf16 if work.type == "bf16" else self.fp32)
        return {"bytes": work.bytes / self.bytes, "matrix": matrix, "vector": vector}

    def floor(self, work):
        """The milliseconds, and the resource that takes them."""
        what, seconds = max(self.seconds(work).items(), key=lambda pair: pair[1])
        return seconds * 1e3, what


# NVIDIA's data sheet of the H200 SXM. AMD's of the MI250, halved: a die has 104 of 208 compute units, 1.64 of 3.28 TB/s, 181.0
# of 362.1 TFLOP/s in bf16 and 45.3 of 90.5 in fp32 (matrix), at 1.7 GHz. AMD's of the MI300X: 304 compute units at 2.1 GHz,
# 5.3 TB/s, 1307.4 and 163.4 TFLOP/s. Operations of a unit in a clock: AMD's guides of CDNA 2 and CDNA 3 (256 operations of
# packed fp32; transcendental instructions at a quarter of the rate, in the same pipeline).
H200 = Device("H200", 4.8e12, 989.4e12, 66.9e12, 132 * 1.98e9, at_once=True)
AMD = [
    Device("MI250, one die", 1.6384e12, 181.0e12, 45.3e12, 104 * 1.7e9),
    Device("MI300X", 5.3e12, 1307.4e12, 163.4e12, 304 * 2.1e9),
]


@dataclass
class Work:
    """One direction of a kernel at a shape."""

    name: str
    type: str
    milliseconds: float
    # The rate in BENCHMARKS.md: a number and its unit.
    rate: tuple[float, str]
    bytes: float = 0
    matrix: float = 0
    operations: float = 0
    exponentials: float = 0

    def found_rate(self):
        amount = {"GB/s": self.bytes / 1e9, "TFLOP/s": self.matrix / 1e12}[self.rate[1]]
        return amount / (self.milliseconds / 1e3)


def sizes_of(name):
    """The sizes in the first parentheses of a row's name."""
    return [int(size) for size in re.findall(r"\d+", re.search(r"\(([^)]*)\)", name)[1])]


def of_scan(name, width, backward):
    samples, positions, channels, states = sizes_of(name)
    elements, rows = samples * positions * channels, samples * positions
    # Rows of delta, x, z and out; backward also dout and y, and three gradients for out. B and C, and their gradients.
    moved = elements * (8 if backward else 4) + rows * 2 * states * (2 if backward else 1)
    # The counts in the headers of scan_forward.cu and scan_backward.cu, for each state and position.
    return {"bytes": moved * width, "exponentials": elements * states,
            "operations": elements * states * (15 if backward else 5)}


def rowwise(forward, backward):
    """Bytes an element, with activations of bf16 and of fp32."""
    def count(name, width, is_backward):
        elements = 1
        for size in sizes_of(name)[:3]:
            elements *= size
        return {"bytes": elements * (backward if is_backward else forward)[width]}
    return count


def of_activations(forward, backward):
    """Bytes an element, where all are activations."""
    return rowwise({2: 2 * forward, 4: 4 * forward}, {2: 2 * backward, 4: 4 * backward})


def of_embedding(name, _, backward):
    rows, columns, _ = sizes_of(name)
    return {"bytes": rows * columns * (12 if backward else 8)}


def of_product(name, width, _):
    m, n, k = sizes_of(name)
    return {"bytes": (m * n + m * k + n * k) * width, "matrix": 2 * m * n * k}


def of_gradient(name, width, _):
    rows, n, k = int(re.search(r"grain of (\d+)", name)[1]), 8192, 2048
    return {"bytes": rows * (n + k) * width + n * k * 8, "matrix": 2 * rows * n * k}


def of_attention(name, width, backward):
    samples, heads, positions, head_width = sizes_of(name)
    elements, seen = samples * heads * positions * head_width, samples * heads * positions**2 / 2
    return {"bytes": elements * width * (8 if backward else 4), "exponentials": seen,
            "matrix": 4 * seen * head_width * (2.5 if backward else 1)}


COUNTED = {
    "selective scan": of_scan,
    "scan": of_scan,
    "convolution": of_activations(2, 3),
    "RMSNorm": rowwise({2: 6}, {2: 16}),
    "layer norm": rowwise({2: 6}, {2: 16}),
    "GELU": of_activations(2, 3),
    "biases": of_activations(2, 1),
    "embedding": of_embedding,
    "cross-entropy": of_activations(2, 0),
    "product": of_product,
    "gradient of in_proj": of_gradient,
    "(": of_attention,
}
# Bytes a parameter of the rows that say how many there are: 2^27.
OF_PARAMETERS = {"AdamW": 28, "adding a gradient": 12, "sums of squares": 4}


def work_of(name, backward, milliseconds, rate):
    kind = "fp32" if "fp32" in name else "bf16"
    label = f"attention {name}" if name.startswith("(") else name
    work = Work(f"{label}, backward" if backward else label, kind, milliseconds, rate)
    for start, bytes_of_one in OF_PARAMETERS.items():
        if name.startswith(start):
            work.bytes = bytes_of_one * 2**27
            return work
    start = max((start for start in COUNTED if name.startswith(start)), key=len)
    counts = COUNTED[start](name, 2 if kind == "bf16" else 4, backward)
    for count, value in counts.items():
        setattr(work, count, value)
    return work


def read_rows(text):
    """Every kernel in the tables of kernels and of attention."""
    rate = r"([\d.]+) (GB/s|TFLOP/s)"
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        timed = [re.match(rf"([\d.]+) \({rate}, \d+ %\)$", cell) for cell in cells]
        if len(cells) == 5 and timed[1] and timed[3]:
            for backward, found in ((False, timed[1]), (True, timed[3])):
                yield work_of(cells[0], backward, float(found[1]), (float(found[2]), found[3]))
        elif len(cells) == 3 and (found := re.match(rf"{rate}, \d+ %$", cells[2])):
            yield work_of(cells[0], False, float(cells[1]), (float(found[1]), found[2]))
        elif len(cells) == 6 and re.match(r"\(\d+, \d+ heads, \d+, \d+\)", cells[0]):
            yield work_of(cells[0], False, float(cells[1]), (float(cells[2]), "TFLOP/s"))
            yield work_of(cells[0], True, float(cells[3]), (float(cells[4]), "TFLOP/s"))


def refused(works):
    """The disagreements with the measured rates, which have three digits, as the times do."""
    lines = [f"{work.name}: {work.found_rate():.1f} {work.rate[1]} by these counts, {work.rate[0]} in {BENCHMARKS.name}"
             for work in works if abs(work.found_rate() / work.rate[0] - 1) > 0.015]
    lines += [f"{work.name}: {work.milliseconds} ms were measured, below the floor of {H200.floor(work)[0]:.4f}"
              for work in works if work.milliseconds < H200.floor(work)[0] * 0.97]
    if len(works) < 50:
        lines.append(f"{len(works)} kernels were found in {BENCHMARKS.name}, expected at least 50")
    return lines


def table(works):
    yield "| kernel | H200, measured | H200, floor | " + " | ".join(f"{device.name}, floor" for device in AMD) + " |"
    yield "|---" * (3 + len(AMD)) + "|"
    for work in works:
        floors = [device.floor(work) for device in [H200, *AMD]]
        cells = [f"{milliseconds:#.3g} ({what})" for milliseconds, what in floors]
        yield f"| {work.name} | {work.milliseconds:#.3g} | " + " | ".join(cells) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the table in BENCHMARKS.md")
    arguments = parser.parse_args()
    text = BENCHMARKS.read_text()
    works = list(read_rows(text.partition(BEGIN)[0] + text.partition(END)[2]))
    wrong = refused(works)
    lines = "\n".join(table(works))
    if not arguments.check:
        print(lines)
    elif f"{BEGIN}\n\n{lines}\n\n{END}" not in text:
        wrong.append(f"{BENCHMARKS.name} has another table of floors than this prints")
    for line in wrong:
        print(f"refused: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
