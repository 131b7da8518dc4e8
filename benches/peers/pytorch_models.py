"""The Mamba-2 and Llama models of `tidemill bench train` in PyTorch: fp32 parameters, products in bf16 by autocast.

A block is one function of the residual and of its layer's parameters, so that torch.compile compiles it once for all layers. Queries, keys
and values are one product, and so are the two halves of the gated MLP. Norms, gates and the loss are computed in fp32.
"""

import math

import torch
from torch import nn
from torch.nn import functional

import head_scan

NORM_EPS = 1e-5


def rms_norm(x, weight):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS) * weight


def loss_of(x, norm, table, following):
    """Cross-entropy of `x[b, t, d]`; the output head is the embedding table."""
    logits = functional.linear(rms_norm(x, norm), table)
    return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def normal(*shape, deviation=0.02):
    return nn.Parameter(torch.empty(*shape).normal_(std=deviation))


def uniform(*shape, bound):
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def ones(*shape):
    return nn.Parameter(torch.ones(*shape))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and an output head tied to the embedding; returns the loss. `turns`: further inputs of every block."""

    def __init__(self, sizes, layers, block, residual, compiled, turns=None):
        super().__init__()
        self.embedding = normal(sizes["vocabulary"], sizes["width"])
        self.layers = nn.ModuleList(layers)
        self.norm = ones(sizes["width"])
        self.residual = residual
        self.register_buffer("turns", turns)
        self.block, self.loss = compiled(block), compiled(loss_of)

    def forward(self, tokens, following):
        x = functional.embedding(tokens, self.embedding).to(self.residual)
        for layer in self.layers:
            x = self.block(x, dict(layer.items()), self.turns)
        return self.loss(x, self.norm, self.embedding, following)


# --- Mamba-2 ------------------------------------------------------------------------------------------------

MAMBA_2 = {"vocabulary": 50_288, "width": 2048, "layers": 48, "head_width": 64, "states": 128, "taps": 4}


def shifted(x, taps, bias):
    """The causal convolution of each channel of `x[b, t, c]` as a sum of shifted products, which torch.compile fuses into one kernel."""
    positions, width = x.shape[1], taps.shape[1]
    padded = functional.pad(x, (0, 0, width - 1, 0))
    found = sum(padded[:, at : at + positions] * taps[:, at] for at in range(width)) + bias
    return functional.silu(found).to(x.dtype)


def cudnn(x, taps, bias):
    """The same by PyTorch's conv1d."""
    positions, width = x.shape[1], taps.shape[1]
    found = functional.conv1d(x.transpose(1, 2), taps[:, None], bias, padding=width - 1, groups=x.shape[2])
    return functional.silu(found[..., :positions]).transpose(1, 2)


CONVOLUTIONS = {"shifted": shifted, "cudnn": cudnn}


def mamba_2_layer(sizes):
    d, n, k = sizes["width"], sizes["states"], sizes["taps"]
    e, c = 2 * d, 2 * d + 2 * n
    h = e // sizes["head_width"]
    steps = torch.exp(torch.empty(h).uniform_(math.log(1e-3), math.log(0.1))).clamp(min=1e-4)
    return nn.ParameterDict({
        "norm": ones(d),
        "in_proj": uniform(e + c + h, d, bound=d**-0.5),
        "taps": uniform(c, k, bound=k**-0.5),
        "conv_bias": uniform(c, bound=k**-0.5),
        "dt_bias": nn.Parameter(steps + torch.log(-torch.expm1(-steps))),
        "a_log": nn.Parameter(torch.empty(h).uniform_(1.0, 16.0).log()),
        "d": ones(h),
        "gated_norm": ones(e),
        "out_proj": uniform(d, e, bound=(e * sizes["layers"])**-0.5),
    })


def mamba_2(sizes, residual, compiled, convolution="shifted", scan=head_scan.head_scan):
    """Mamba-2 (Dao and Gu, 2024, section 7), with one group: the norm after the gate is over all heads."""
    convolve, p, n = CONVOLUTIONS[convolution], sizes["head_width"], sizes["states"]

    def block(x, layer, _):
        d = x.shape[-1]
        e, h = 2 * d, 2 * d // p
        projected = functional.linear(rms_norm(x, layer["norm"]), layer["in_proj"])
        z, xbc, dt = projected.split([e, e + 2 * n, h], dim=-1)
        heads, of_b, of_c = convolve(xbc, layer["taps"], layer["conv_bias"]).split([e, n, n], dim=-1)
        a = -torch.exp(layer["a_log"])
        out = scan(heads.unflatten(-1, (h, p)), dt, a, of_b[:, :, None], of_c[:, :, None], layer["d"], layer["dt_bias"],
                   head_scan.CHUNK)
        gated = out.flatten(2).float() * functional.silu(z.float())
        return x + functional.linear(rms_norm(gated, layer["gated_norm"]), layer["out_proj"]).to(x.dtype)

    layers = [mamba_2_layer(sizes) for _ in range(sizes["layers"])]
    return LanguageModel(sizes, layers, block, residual, compiled)


# --- Llama --------------------------------------------------------------------------------------------------

LLAMA = {"vocabulary": 128_256, "width": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "mlp_width": 8192, "positions": 2048}
ROPE_THETA = 500_000.0


def rotate(x, cosines, sines):
    """Rotary positions of `x[b, h, t, p]`: each channel of the first half is rotated with one of the second."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(x.dtype)


def llama_layer(sizes):
    d, f = sizes["width"], sizes["mlp_width"]
    shared = d // sizes["heads"] * sizes["kv_heads"]
    return nn.ParameterDict({
        "norm_1": ones(d),
        "query_key_value": normal(d + 2 * shared, d),
        "out_proj": normal(d, d),
        "norm_2": ones(d),
        "gate_up": normal(2 * f, d),
        "down_proj": normal(d, f),
    })


def llama(sizes, residual, compiled, keys="shared"):
    """Llama (Touvron et al., 2023) with grouped-query attention. `keys`: whether the heads of queries share the heads of keys and
    values, or the latter are `repeated` in memory."""
    h, g = sizes["heads"], sizes["kv_heads"]
    p = sizes["width"] // h
    angles = torch.arange(sizes["positions"])[:, None] * ROPE_THETA ** (-torch.arange(0, p, 2) / p)

    def block(x, layer, turns):
        cosines, sines = turns
        projected = functional.linear(rms_norm(x, layer["norm_1"]), layer["query_key_value"]).unflatten(-1, (h + 2 * g, p))
        q, k, v = projected.transpose(1, 2).split([h, g, g], dim=1)
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        if keys == "repeated":
            k, v = (each.repeat_interleave(h // g, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=keys == "shared")
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), layer["out_proj"]).to(x.dtype)
        gate, up = functional.linear(rms_norm(x, layer["norm_2"]), layer["gate_up"]).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, layer["down_proj"]).to(x.dtype)

    layers = [llama_layer(sizes) for _ in range(sizes["layers"])]
    return LanguageModel(sizes, layers, block, residual, compiled, torch.stack([angles.cos(), angles.sin()]))
