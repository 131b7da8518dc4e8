"""The scan of heads of Mamba-2 by mamba-ssm's Triton kernels (Dao and Gu, 2024), and position by position to check them.

mamba-ssm is read from its sources, of which only `ops/triton` and `utils` are needed: no extension is built.

    pip download --no-binary mamba-ssm --no-deps --no-build-isolation mamba-ssm   # with MAMBA_SKIP_CUDA_BUILD=TRUE
    tar xzf mamba_ssm-*.tar.gz

Where einops and packaging are not installed, they are found beside `mamba_ssm`.
"""

import contextlib
import importlib
import pathlib
import re
import sys
import types

import torch
from torch import Tensor
from torch.nn import functional

# Positions of a chunk in mamba-ssm's own models.
CHUNK = 256

# mamba-ssm's module of the scan, after loading.
kernels = None


def load(folder):
    """Imports mamba-ssm's Triton kernels from `folder`, and returns their version."""
    global kernels
    package = pathlib.Path(folder, "mamba_ssm")
    if not (package / "ops" / "triton" / "ssd_combined.py").is_file():
        sys.exit(f"--mamba-ssm {folder}: expected a folder with mamba_ssm/ops/triton/ssd_combined.py in it, as the unpacked sources of "
                 "mamba-ssm have; see the first lines of head_scan.py for how to get them")
    # The package's own __init__ imports an extension; an empty package replaces it.
    stand_in = types.ModuleType("mamba_ssm")
    stand_in.__path__ = [str(package)]
    sys.modules["mamba_ssm"] = stand_in
    sys.path.append(str(folder))
    try:
        kernels = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except ModuleNotFoundError as error:
        sys.exit(f"--mamba-ssm {folder}: mamba-ssm needs the package {error.name}: install it, or unpack it beside mamba_ssm")
    if not torch.cuda.is_available():
        # Triton's interpreter runs kernels on the CPU, which has no device to select and nothing to tune.
        torch.cuda.device = lambda index: contextlib.nullcontext()
        torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=2)
        tune_nothing()
    found = re.search(r'__version__ = "(.+)"', (package / "__init__.py").read_text())
    return found[1] if found else "unknown"


def tune_nothing():
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, config, **meta: [self.configs.index(config)] * 3


def reference(x, dt, a, b, c, d, dt_bias, chunk=CHUNK, z=None):
    """The scan position by position, in fp32: of `x[b, t, h, p]`, `dt[b, t, h]`, `a[h]`, `b[b, t, g, n]`, `c[b, t, g, n]`, `d[h]`, `dt_bias[h]`.

        delta = softplus(dt + dt_bias)
        state = exp(delta a) state + delta x b
        out   = (c . state + d x) silu(z)
    """
    kind, heads = x.dtype, x.shape[2]
    b, c = (each.float().repeat_interleave(heads // each.shape[2], dim=2) for each in (b, c))
    x, delta = x.float(), functional.softplus(dt.float() + dt_bias)
    state, out = torch.zeros(*x[:, 0].shape, b.shape[-1], device=x.device), []
    for at in range(x.shape[1]):
        kept = torch.exp(delta[:, at] * a)[..., None, None] * state
        state = kept + (delta[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None, :]
        out.append((state * c[:, at, :, None, :]).sum(-1) + d[:, None] * x[:, at])
    out = torch.stack(out, dim=1)
    return (out if z is None else out * functional.silu(z.float())).to(kind)


@torch.library.custom_op("peers::head_scan", mutates_args=())
def head_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor, chunk: int) -> Tensor:
    """mamba-ssm's scan without a gate, as an operation that is opaque to torch.compile."""
    found = kernels._mamba_chunk_scan_combined_fwd(x, dt, a, b, c, chunk, D=d, dt_bias=dt_bias, dt_softplus=True)
    return found[0]


@torch.library.custom_op("peers::head_scan_backward", mutates_args=())
def head_scan_backward(dout: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, out: Tensor, d: Tensor, dt_bias: Tensor,
                       chunk: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = kernels._mamba_chunk_scan_combined_bwd(dout, x, dt, a, b, c, out, chunk, D=d, dt_bias=dt_bias, dt_softplus=True)
    dx, ddt, da, db, dc, dd, _, ddt_bias, _ = found
    return tuple(each.contiguous() for each in (dx, ddt, da, db, dc, dd, ddt_bias))


@head_scan.register_fake
def _(x, dt, a, b, c, d, dt_bias, chunk):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@head_scan_backward.register_fake
def _(dout, x, dt, a, b, c, out, d, dt_bias, chunk):
    return tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (x, dt, a, b, c, d, dt_bias))


def _save(ctx, inputs, output):
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx, dout):
    x, dt, a, b, c, d, dt_bias, out = ctx.saved_tensors
    return *head_scan_backward(dout, x, dt, a, b, c, out, d, dt_bias, ctx.chunk), None


head_scan.register_autograd(_backward, setup_context=_save)
