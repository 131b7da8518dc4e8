"""The measurements: commands, their numbers of GPUs, and their estimated times."""

import dataclasses
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SEQUENCE = 2048
# Samples of a step in strong scaling.
STRONG_SAMPLES = 256


@dataclasses.dataclass
class Job:
    """A command on some GPUs; with `result`, its last line is JSON."""

    name: str
    gpus: int
    command: list[str]
    # Estimated seconds: the longest jobs start first, and a job that would not end in time does not start.
    seconds: float
    result: bool = True


@dataclasses.dataclass
class Model:
    preset: str
    # Samples of a grain, and grains of a microbatch.
    grain_samples: int
    microbatch_grains: int
    # What several GPUs must shard.
    shard: str
    # Estimated seconds until the first step, and estimated tokens a second of a GPU.
    start: float
    rate: float
    # Measured steps with 32 and with 8 samples a GPU, and with a fixed number of samples.
    steps: tuple[int, int, int]
    # Whether several lanes fit a worker's memory.
    several_lanes: bool = True

    def train(self, gpus: int, samples: int, steps: int, *, lanes: int = 0, processes: int = 1, profile: bool = False):
        """The flags of `tidemill bench train`, and its seconds."""
        shard = ["--shard", self.shard] if gpus > 1 else []
        flags = [
            *("bench", "train", "--backend", "cuda", "--precision", "bf16", "--format", "json"),
            *("--preset", self.preset, "--seq-len", str(SEQUENCE), "--steps", str(steps)),
            *("--samples-per-step", str(samples), "--lanes", str(lanes or gpus)),
            *(
                "--grain-samples",
                str(min(self.grain_samples, samples)),
                "--microbatch-grains",
                str(self.microbatch_grains),
            ),
            *("-n", str(processes), "-w", str(gpus // processes), *shard),
            *(["--profile"] if profile else []),
        ]
        return flags, self.start + (steps + 1) * samples * SEQUENCE / gpus / self.rate


MODELS = [
    Model("mamba-1.4b", 4, 2, "optimizer", 8, 46_000, (4, 8, 2)),
    Model("mpt-1b", 4, 2, "optimizer", 8, 58_000, (4, 8, 2)),
    Model("mpt-7b", 1, 1, "parameters", 14, 11_000, (1, 3, 1), several_lanes=False),
]


def counts(gpus: int) -> list[int]:
    """The powers of two up to `gpus`, and `gpus`."""
    return sorted({gpus, *(2**power for power in range(gpus.bit_length()) if 2**power <= gpus)})


def training(program: str, model: Model, gpus: int) -> list[Job]:
    """Weak and strong scaling of a model on `gpus` GPUs."""
    name = f"{model.preset} {gpus}"
    many, few, strong = model.steps
    jobs = []

    def add(what: str, *arguments, **settings) -> None:
        flags, seconds = model.train(gpus, *arguments, **settings)
        jobs.append(Job(f"{name} {what}", gpus, [program, *flags], seconds))

    add("weak 32", 32 * gpus, many)
    add("weak 8", 8 * gpus, few)
    # The same lanes for all numbers of GPUs, so that their losses are equal to the last digit.
    lanes = max(8, gpus) if model.several_lanes else gpus
    add(f"strong {STRONG_SAMPLES}", STRONG_SAMPLES, strong, lanes=lanes)
    if gpus == 1:
        add("profile 8", 8, 1, profile=True)
        # The time of small steps.
        for samples in (1, 2, 4):
            add(f"weak {samples}", samples, few)
    elif model.several_lanes:
        add("processes 32", 32 * gpus, many, processes=gpus)
    else:
        add("processes 8", 8 * gpus, few, processes=gpus)
    return jobs


def sums(program: str, gpus: int) -> list[Job]:
    """Sums along the tree, gathers, and NCCL's own collectives, over threads and over processes."""
    flags = [program, "bench", "collective", "--backend", "cuda", "--format", "json"]
    buckets = ["--buckets", "1,4,16,64,256,1024"]
    return [
        Job(f"sums {gpus} threads", gpus, [*flags, *buckets, "-w", str(gpus)], 25),
        Job(f"sums {gpus} processes", gpus, [*flags, *buckets, "-n", str(gpus), "-w", "1"], 30),
    ]


def peers(gpus: int) -> list[Job]:
    """PyTorch's DDP and FSDP2."""
    ways = ["ddp", "fsdp2"] if gpus > 1 else ["ddp"]
    samples = ",".join(map(str, [32, 8, STRONG_SAMPLES // gpus] if gpus > 1 else [32, 8]))
    command = [sys.executable, str(HERE / "pytorch.py"), "--samples", samples]
    return [Job(f"mpt-1b {gpus} {way}", gpus, [*command, "--way", way], 75) for way in ways]


def promises(program: str, gpus: int) -> list[Job]:
    """The elasticity and kill tests of the whole system, on all GPUs."""
    filters = ["elastic::", "kill_and_resume::", "--test-threads", str(gpus)]
    return [
        Job(
            f"promises {gpus} {precision}",
            gpus,
            ["env", f"TIDEMILL_TEST_PRECISION={precision}", program, *filters],
            90,
            False,
        )
        for precision in ("fp32", "bf16")
    ]


def moving(program: str, out: pathlib.Path, gpus: int) -> list[Job]:
    """A run that moves from all GPUs to fewer and back, compared with a run that stays."""
    command = [sys.executable, str(HERE / "moving.py"), str(out / "moving"), "--program", program, "--gpus", str(gpus)]
    return [Job(f"moving {gpus}", gpus, command, 60)]


def all_jobs(program: str, tests: str | None, out: pathlib.Path, gpus: int) -> list[Job]:
    """All jobs of a machine with `gpus` GPUs."""
    jobs = []
    for count in counts(gpus):
        for model in MODELS:
            jobs += training(program, model, count)
        jobs += peers(count)
        if count > 1:
            jobs += sums(program, count)
    if gpus > 1:
        jobs += moving(program, out, gpus)
        jobs += promises(tests, gpus) if tests else []
    return jobs


def finished(results: pathlib.Path) -> dict[str, dict]:
    """The successful measurements by name."""
    if not results.exists():
        return {}
    return {line["job"]: line for line in map(json.loads, results.read_text().splitlines()) if "failed" not in line}
