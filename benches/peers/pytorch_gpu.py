"""PyTorch on one NVIDIA GPU beside `tidemill bench`: mamba-ssm's scan of heads, and training of mamba2-1.3b and of llama-1b.

    python benches/peers/pytorch_gpu.py scan --mamba-ssm FOLDER
    python benches/peers/pytorch_gpu.py mamba2 --mamba-ssm FOLDER
    python benches/peers/pytorch_gpu.py llama
    python benches/peers/pytorch_gpu.py block

torch 2.11 with its Triton; FOLDER has mamba-ssm's sources (head_scan.py says how to get them). `scan` compares the kernels with the scan position
by position, then times them: forward, backward, and both, as medians in milliseconds, with launches queued ahead. `block` times what a block of a
Llama does beside its products, at the shapes of `tidemill bench kernels --shape B,T,E,N`, whose width is E / 2. `mamba2` and `llama` train on
random tokens: bf16 by autocast over fp32 parameters, fused AdamW, gradients clipped to 1, torch.compile for the blocks and
the loss, gradients of microbatches added up to a step. Each variant runs with the first microbatch that fits, and the fastest variant with the others;
settings that do not fit or run are reported. A setting is skipped if it would end after `--seconds`, should it take as long as the last one. Figures
are JSON lines, the best last.

`--check` needs no GPU. Small models with the scan position by position must have the presets' numbers of parameters at full size, gradients of
all parameters and a falling loss, traced and untraced. With TRITON_INTERPRET=1 `scan --check` runs the kernels themselves, which takes minutes
(Triton 3.6 interprets with NumPy before 2.4).
"""

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import statistics
import sys
import time

# Microbatches of several sizes run in one process.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch._functorch import config as functorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import softplus

import head_scan
import pytorch_models as models

WARM_UP_STEPS = 2
# The numbers of parameters of Tidemill's presets.
PARAMETERS = {"mamba2": 1_343_757_312, "llama": 1_235_814_400}
# The largest allowed errors of kernels in bf16 and in fp32, relative by norms.
TOLERANCES = {torch.bfloat16: 5e-2, torch.float32: 1e-4}
NO_SOURCES = "expected --mamba-ssm FOLDER with mamba-ssm's sources; head_scan.py says how to get them"

SMALL = {
    "mamba2": {**models.MAMBA_2, "vocabulary": 96, "width": 32, "layers": 2, "head_width": 16, "states": 8},
    "llama": {**models.LLAMA, "vocabulary": 96, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 64, "positions": 24},
}


def emit(program, setting, figure):
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    line = {"program": program, "setting": setting, "figure": figure, "torch": torch.__version__, "device": device}
    print(json.dumps(line), flush=True)


class Deadline:
    """The time limit: allows a setting if it ends in time when it takes as long as the last one."""

    def __init__(self, seconds):
        self.end, self.last = time.monotonic() + seconds, 0.0

    def allows(self):
        return time.monotonic() + self.last < self.end

    @contextlib.contextmanager
    def setting(self):
        started = time.monotonic()
        yield
        self.last = time.monotonic() - started


# --- the scan -----------------------------------------------------------------------------------------------


def scan_inputs(device, kind, samples, positions, heads, width, states):
    """x, dt, a, b, c, d, dt_bias and z, with values of the size found in a new model."""
    def drawn(*shape):
        return torch.randn(*shape, device=device).to(kind)

    steps = torch.linspace(math.log(1e-3), math.log(0.1), heads, device=device).exp()
    return {
        "x": drawn(samples, positions, heads, width),
        "dt": drawn(samples, positions, heads).float(),
        "a": -torch.linspace(1.0, 16.0, heads, device=device),
        "b": drawn(samples, positions, 1, states),
        "c": drawn(samples, positions, 1, states),
        "d": torch.ones(heads, device=device),
        "dt_bias": steps + torch.log(-torch.expm1(-steps)),
        "z": drawn(samples, positions, heads, width),
    }


def numbers_of_documents(samples, positions, documents):
    """The document number of each position, `[b, t]`, with documents of equal length."""
    return (torch.arange(positions, device="cuda", dtype=torch.int32) // documents).expand(samples, positions).contiguous()


def combined(inputs, chunk, parts, numbers=None):
    """mamba-ssm's scan with the given parts; without softplus the inputs are the step sizes themselves."""
    x, dt, a, b, c = (inputs[name] for name in ("x", "dt", "a", "b", "c"))
    others = {"seq_idx": numbers}
    if "softplus" in parts:
        others |= {"dt_bias": inputs["dt_bias"], "dt_softplus": True}
    if "skip" in parts:
        others["D"] = inputs["d"]
    if "gate" in parts:
        others["z"] = inputs["z"]
    return head_scan.kernels.mamba_chunk_scan_combined(x, dt, a, b, c, chunk, **others)


def error(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def disagreements(inputs, chunk):
    """Errors of the scan with all parts and of its gradients, and of the model's operation, which has no gate."""
    names = list(inputs)
    dout = torch.randn(inputs["x"].shape, device=inputs["x"].device).to(inputs["x"].dtype)
    scans = {
        "": (lambda given: combined(given, chunk, ("softplus", "skip", "gate")), lambda given: head_scan.reference(**given)),
        "operation: ": (lambda given: head_scan.head_scan(**given, chunk=chunk), lambda given: head_scan.reference(**given)),
    }
    errors = {}
    for label, (kernel, reference) in scans.items():
        own = names if not label else [name for name in names if name != "z"]
        results = []
        for scan in (kernel, reference):
            given = {name: inputs[name].detach().clone().requires_grad_() for name in own}
            out = scan(given)
            results.append([out, *torch.autograd.grad(out, list(given.values()), dout)])
        for name, found, expected in zip(["out", *(f"d{name}" for name in own)], *results):
            errors[label + name] = error(found, expected)
    return errors


def milliseconds(work):
    """The median of 20; the device sleeps while the host queues five, so that gaps between launches are not measured."""
    for _ in range(3):
        work()
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
        torch.cuda._sleep(50_000_000)
        for begin, end in events:
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        found += [begin.elapsed_time(end) for begin, end in events]
    return statistics.median(found)


def scan(arguments):
    if arguments.mamba_ssm is None:
        sys.exit(f"scan: {NO_SOURCES}")
    program = f"mamba-ssm {head_scan.load(arguments.mamba_ssm)} mamba_chunk_scan_combined"
    if arguments.check:
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("scan --check: expected TRITON_INTERPRET=1 in the environment, with which Triton runs kernels on the CPU")
        inputs = scan_inputs("cpu", torch.float32, samples=2, positions=40, heads=3, width=16, states=16)
        return judge(program, {"chunk": 16}, disagreements(inputs, chunk=16), TOLERANCES[torch.float32])
    deadline = Deadline(arguments.seconds)
    samples, positions = arguments.shape
    sizes = {"heads": 64, "width": 64, "states": 128}
    every = scan_inputs("cuda", torch.bfloat16, samples, positions, **sizes)
    dout = torch.randn(every["x"].shape, device="cuda").to(torch.bfloat16)
    numbers = numbers_of_documents(samples, positions, arguments.documents) if arguments.documents else None
    for chunk in arguments.chunks:
        for parts in (("softplus", "skip", "gate"), ("softplus", "skip"), ()):
            setting = {"samples": samples, "positions": positions, **sizes, "chunk": chunk, "parts": parts, "documents": arguments.documents}
            if not deadline.allows():
                emit(program, setting, "not tried: no time left")
                continue
            with deadline.setting():
                own = ["x", "dt", "a", "b", "c"] + [{"softplus": "dt_bias", "skip": "d", "gate": "z"}[part] for part in parts]
                given = {name: every[name].clone() for name in own}
                if not parts:
                    given["dt"] = softplus(every["dt"] + every["dt_bias"])
                leaves = [each.requires_grad_() for each in given.values()]
                run = functools.partial(combined, given, chunk, parts, numbers)
                torch.cuda.reset_peak_memory_stats()
                # The first call autotunes.
                out = run()
                torch.autograd.grad(out, leaves, dout, retain_graph=True)
                with torch.no_grad():
                    forward = milliseconds(run)
                backward = milliseconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
                both = milliseconds(lambda: torch.autograd.grad(run(), leaves, dout))
                found = {"forward_ms": forward, "backward_ms": backward, "forward_backward_ms": both,
                         "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
                emit(program, setting, {name: round(value, 3) for name, value in found.items()})
                del out, leaves, given
    # After the timings: the kernels are tuned only once, for any numbers of samples and positions.
    few = {name: each[:1, :512] if each.ndim > 1 else each for name, each in every.items()}
    for chunk in arguments.chunks:
        judge(program, {"chunk": chunk, "positions": 512}, disagreements(few, chunk), TOLERANCES[torch.bfloat16])


def judge(program, setting, errors, tolerance):
    emit(program, {**setting, "compared with": "the scan position by position, fp32"}, {name: float(f"{value:.2g}") for name, value in errors.items()})
    wrong = [name for name, value in errors.items() if not value < tolerance]
    if wrong:
        sys.exit(f"scan: expected errors below {tolerance}, found more of {', '.join(wrong)}")


# --- the operations of a block of a Llama ---------------------------------------------------------------------


def block_operations(samples, positions, width, device):
    """Name, function, inputs and shape of each operation: activations `[b, t, ...]` of bf16 as products give them, and weights."""
    head_width = 64 if width < 1024 else 128
    h = max(width // head_width, 1)
    g = h // 4 if h % 4 == 0 else h

    def drawn(*shape):
        return torch.randn(samples, positions, *shape, device=device, dtype=torch.bfloat16).requires_grad_()

    angles = torch.arange(positions, device=device)[:, None] * models.ROPE_THETA ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    weight = torch.ones(head_width, device=device, requires_grad=True)

    def attention(qkv):
        q, k, v = qkv.transpose(1, 2).split([h, g, g], dim=1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def attention_with(backend):
        def run(qkv):
            with sdpa_kernel(backend):
                return attention(qkv)
        return run

    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    shown = [samples, positions, f"{h} of {g}", head_width]
    yield "attention_shared_keys, flash", attention_with(SDPBackend.FLASH_ATTENTION), [drawn(h + 2 * g, head_width)], shown
    yield "attention_shared_keys, cudnn", attention_with(SDPBackend.CUDNN_ATTENTION), [drawn(h + 2 * g, head_width)], shown
    turned = compiled(lambda qk: models.rotate(qk.transpose(1, 2), angles.cos(), angles.sin()))
    yield "rotary", turned, [drawn(h + g, head_width)], shown
    normed = compiled(lambda x, weight: models.rms_norm(x, weight).to(x.dtype))
    yield "rms_norm_heads", normed, [drawn(h, head_width), weight], [samples * positions, h, head_width]

    def gated(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    yield "gated_silu", compiled(gated), [drawn(8 * width)], [samples * positions, 4 * width]


def block(arguments):
    # Gradients are formed again and again of one forward pass, whose tensors a compiled function would give away.
    functorch.donated_buffer = False
    samples, positions, inner, _ = arguments.shape
    device = "cpu" if arguments.check else "cuda"
    for name, run, inputs, shape in block_operations(samples, positions, inner // 2, device):
        if arguments.check and "attention" in name:
            continue
        out = run(*inputs)
        dout = torch.randn_like(out)
        backward = functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
        if arguments.check:
            figure = {"finite": all(bool(each.isfinite().all()) for each in [out, *backward()])}
        else:
            with torch.no_grad():
                forward = milliseconds(lambda: run(*inputs))
            figure = {"forward_ms": round(forward, 4), "backward_ms": round(milliseconds(backward), 4)}
        emit(f"PyTorch {name}", {"shape": shape}, figure)


# --- training -----------------------------------------------------------------------------------------------

# The variants of a model, and the arguments of its function in each.
VARIANTS = {
    "mamba2": {"convolution shifted": {"convolution": "shifted"}, "convolution cudnn": {"convolution": "cudnn"}},
    "llama": {
        "attention cudnn": {"keys": "shared", "backend": SDPBackend.CUDNN_ATTENTION},
        "attention flash": {"keys": "shared", "backend": SDPBackend.FLASH_ATTENTION},
        "attention cudnn, keys repeated": {"keys": "repeated", "backend": SDPBackend.CUDNN_ATTENTION},
    },
}
BUILDERS = {"mamba2": models.mamba_2, "llama": models.llama}


class Trainer:
    """A model with its optimizer; a step trains on `tokens[samples, t + 1]`, in microbatches."""

    def __init__(self, model, device, microbatch):
        self.model, self.device, self.microbatch = model, device, microbatch
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def gradients(self, tokens):
        """Adds the gradient of the mean loss over all samples; returns the loss."""
        parts = tokens.split(self.microbatch)
        total = torch.zeros((), device=self.device)
        for part in parts:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.model(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, tokens):
        loss = self.gradients(tokens)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def train(name, variant, microbatch, arguments):
    """Tokens a second, and the other measurements."""
    options = dict(VARIANTS[name][variant])
    backend = options.pop("backend", None)
    torch._dynamo.reset()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(17)
    started = time.monotonic()
    sizes = models.MAMBA_2 if name == "mamba2" else {**models.LLAMA, "positions": arguments.seq_len}
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    with torch.device("cuda"):
        model = BUILDERS[name](sizes, getattr(torch, arguments.residual), compiled, **options)
        tokens = torch.randint(0, sizes["vocabulary"], (arguments.samples_per_step, arguments.seq_len + 1))
    trainer = Trainer(model, "cuda", microbatch)
    losses, seconds = [], []
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        for at in range(WARM_UP_STEPS + arguments.steps):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            losses.append(trainer.step(tokens).item())
            torch.cuda.synchronize()
            if at == WARM_UP_STEPS - 1:
                warm_up = time.monotonic() - started
            if at >= WARM_UP_STEPS:
                seconds.append(time.perf_counter() - begin)
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"expected finite losses, found {losses}")
    of_step = arguments.samples_per_step * arguments.seq_len
    return {
        "tokens_per_second": round(of_step / statistics.median(seconds)),
        "step_seconds": [round(each, 4) for each in seconds],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "warm_up_seconds": round(warm_up, 1),
        "losses": [round(each, 4) for each in losses],
    }


def attempt(name, variant, microbatch, arguments):
    """As `train`; reports a failure or a lack of memory, and returns None."""
    setting = {"variant": variant, "microbatch": microbatch, "samples_per_step": arguments.samples_per_step,
               "seq_len": arguments.seq_len, "residual": arguments.residual}
    try:
        figure = train(name, variant, microbatch, arguments)
    except torch.OutOfMemoryError:
        figure = "out of memory"
    except Exception as problem:
        figure = f"failed: {type(problem).__name__}: {str(problem)[:400]}"
    # A failed attempt's memory is free only after its exception is gone.
    gc.collect()
    torch.cuda.empty_cache()
    emit(f"PyTorch {name}", setting, figure)
    return (setting, figure) if isinstance(figure, dict) else None


def training(arguments):
    name = arguments.command
    if name == "mamba2" and arguments.mamba_ssm is None and not arguments.check:
        sys.exit(f"mamba2: {NO_SOURCES}")
    if arguments.check:
        return check(name, arguments)
    if name == "mamba2":
        head_scan.load(arguments.mamba_ssm)
    uneven = [each for each in arguments.microbatches if arguments.samples_per_step % each]
    if uneven:
        sys.exit(f"--microbatches: expected divisors of --samples-per-step, which is {arguments.samples_per_step}, found {uneven}")
    deadline, found, variants = Deadline(arguments.seconds), [], list(VARIANTS[name])
    for microbatch in arguments.microbatches:
        fitting = []
        for variant in variants:
            if not deadline.allows():
                emit(f"PyTorch {name}", {"variant": variant, "microbatch": microbatch}, "not tried: no time left")
                continue
            with deadline.setting():
                fitting.append(attempt(name, variant, microbatch, arguments))
        fitting = [each for each in fitting if each]
        if fitting:
            variants = [max(fitting, key=rate)[0]["variant"]]
        found += fitting
    if not found:
        sys.exit(f"{name}: no setting ran; the lines above say why")
    setting, figure = max(found, key=rate)
    emit(f"PyTorch {name}, best", setting, {key: figure[key] for key in ("tokens_per_second", "peak_gib")})


def rate(attempted):
    return attempted[1]["tokens_per_second"]


def check(name, arguments):
    """Checks small models on the CPU, in every variant."""
    full = models.MAMBA_2 if name == "mamba2" else models.LLAMA
    with torch.device("meta"):
        model = BUILDERS[name](full, torch.float32, lambda function: function)
    parameters = sum(each.numel() for each in model.parameters())
    if parameters != PARAMETERS[name]:
        sys.exit(f"{name}: expected {PARAMETERS[name]} parameters, found {parameters}")
    traced = functools.partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    for variant, options in VARIANTS[name].items():
        options = {key: value for key, value in options.items() if key != "backend"}
        if name == "mamba2":
            options["scan"] = head_scan.reference
        losses = {}
        for label, compiled in {"as it is": lambda function: function, "traced": traced}.items():
            torch.manual_seed(17)
            torch._dynamo.reset()
            model = BUILDERS[name](SMALL[name], getattr(torch, arguments.residual), compiled, **options)
            trainer = Trainer(model, "cpu", microbatch=2)
            tokens = torch.randint(0, SMALL[name]["vocabulary"], (4, 25))
            trainer.gradients(tokens)
            still = [key for key, each in model.named_parameters() if each.grad is None or not each.grad.any() or not each.grad.isfinite().all()]
            if still:
                sys.exit(f"{name}, {variant}: expected finite gradients that are not zero, found others of {', '.join(still)}")
            trainer.optimizer.zero_grad(set_to_none=True)
            losses[label] = [trainer.step(tokens).item() for _ in range(8)]
            if not losses[label][-1] < losses[label][0]:
                sys.exit(f"{name}, {variant}, {label}: expected a loss that falls, found {losses[label]}")
        apart = max(abs(one - other) for one, other in zip(*losses.values()))
        if apart > 0.01:
            sys.exit(f"{name}, {variant}: expected the same losses traced and as it is, found {losses}")
        emit(f"PyTorch {name}, check", {"variant": variant}, {"parameters": parameters, "losses": losses["traced"], "apart": apart})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, seconds in {"scan": 120, "block": None, "mamba2": 170, "llama": 150}.items():
        command = commands.add_parser(name)
        command.add_argument("--check", action="store_true", help="small sizes on the CPU")
        if name == "block":
            command.add_argument("--shape", type=lambda text: [int(each) for each in text.split(",")], default=[4, 2048, 4096, 16], metavar="B,T,E,N")
            continue
        command.add_argument("--seconds", type=float, default=seconds, help="no setting is begun that would end later")
        if name != "llama":
            command.add_argument("--mamba-ssm", metavar="FOLDER", help="mamba-ssm's sources, with the folder mamba_ssm in it")
        if name == "scan":
            command.add_argument("--shape", type=int, nargs=2, default=[8, 2048], metavar=("SAMPLES", "POSITIONS"))
            command.add_argument("--chunks", type=int, nargs="+", default=[head_scan.CHUNK, 128], help="positions of a chunk")
            command.add_argument("--documents", type=int, default=0, help="positions of a document; one a sample where 0")
            continue
        command.add_argument("--seq-len", type=int, default=2048)
        command.add_argument("--samples-per-step", type=int, default=32)
        command.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 4], help="samples that are tried, in order")
        command.add_argument("--steps", type=int, default=4)
        # The type in mamba-ssm's models, and the fastest type.
        command.add_argument("--residual", choices=["float32", "bfloat16"], default="float32" if name == "mamba2" else "bfloat16")
    arguments = parser.parse_args()
    if not arguments.check and not torch.cuda.is_available():
        sys.exit(f"{arguments.command}: expected an NVIDIA GPU, found none; --check runs small sizes on the CPU")
    torch.manual_seed(17)
    {"scan": scan, "block": block}.get(arguments.command, training)(arguments)


if __name__ == "__main__":
    main()
