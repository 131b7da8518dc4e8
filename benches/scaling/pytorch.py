"""Tokens a second of PyTorch for MPT-1B over all visible GPUs, which run.sh compares with `tidemill bench train`.

The model is that of the preset mpt-1b (24 layers of 16 heads, width 2048, positions that are learned, tied embeddings), without biases,
which costs PyTorch less. bf16 by autocast over fp32 parameters, fp32 gradients, cuDNN's attention, AdamW (fused), clipped to a norm of 1,
compiled; microbatches of 8 samples, and only the last one reduces gradients. DDP is
torch.nn.parallel.DistributedDataParallel; FSDP2 is fully_shard on every block (PyTorch 2.11), matrices gathered in bf16 and
gradients summed in fp32. One line of JSON for each number of samples a GPU.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HEADS, LAYERS, VOCABULARY, SEQUENCE = 2048, 16, 24, 50_368, 2048
MICROBATCH = 8
STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        normed = functional.layer_norm(x, (WIDTH,), self.norm_1.weight.to(x.dtype))
        q, k, v = self.query_key_value(normed).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        normed = functional.layer_norm(x, (WIDTH,), self.norm_2.weight.to(x.dtype))
        return x + self.down_proj(functional.gelu(self.up_proj(normed)))


class Mpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, following):
        x = (self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        x = functional.layer_norm(x, (WIDTH,), self.norm.weight.to(x.dtype))
        logits = functional.linear(x, self.tokens.weight.to(x.dtype))
        return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def wrapped(way, model, rank, world):
    """The parallel model, and a context that defers the reduction of gradients until the last microbatch."""
    if world == 1:
        return torch.compile(model, dynamic=False), lambda last: contextlib.nullcontext()
    if way == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
        return torch.compile(
            parallel, dynamic=False
        ), lambda last: contextlib.nullcontext() if last else parallel.no_sync()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(dynamic=False)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    def held(last):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return model, held


def worker(rank, world, port, arguments):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    if world > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(where)
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    torch.manual_seed(17)
    torch.backends.cuda.matmul.allow_tf32 = True
    with device:
        model = Mpt()
    called, held = wrapped(arguments.way, model, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(tokens):
        microbatches = tokens.split(MICROBATCH)
        for index, microbatch in enumerate(microbatches):
            with held(index + 1 == len(microbatches)), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = called(microbatch[:, :-1].contiguous(), microbatch[:, 1:].contiguous())
                (loss / len(microbatches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for samples in arguments.samples:
        tokens = torch.randint(0, VOCABULARY, (samples, SEQUENCE + 1), device=device)
        for _ in range(2):
            step(tokens)
        times = []
        for _ in range(STEPS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            step(tokens)
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        if rank == 0:
            milliseconds = statistics.median(times)
            said = {
                "tokens_per_second": world * samples * SEQUENCE / milliseconds * 1e3,
                "step_milliseconds": milliseconds,
                "way": arguments.way if world > 1 else "alone",
                "workers": world,
                "samples_of_a_gpu": samples,
                "device": torch.cuda.get_device_name(),
                "device_memory_bytes": torch.cuda.max_memory_allocated(),
                "torch": torch.__version__,
            }
            print(json.dumps(said), flush=True)
    if world > 1:
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument(
        "--samples",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[32],
        help="samples a GPU and step: multiples of 8",
    )
    arguments = parser.parse_args()
    world = torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if world == 1:
        worker(0, 1, port, arguments)
    else:
        torch.multiprocessing.spawn(worker, (world, port, arguments), nprocs=world)


if __name__ == "__main__":
    main()
