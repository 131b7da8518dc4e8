"""Tokens a second of PyTorch on the CPU, for the same models as `tidemill bench train`.

mamba-10m (vocab 4096, d_model 256, 8 layers, state 16, expand 2, conv 4) is transformers' MambaForCausalLM with the parallel
scan of the package mambapy, the fastest that it has without CUDA. mpt-10m (vocab 4096, d_model 256, 8 layers of 4 heads,
ALiBi, no biases) is written here, since transformers' own model computes attention by separate products: LLM Foundry's block
over scaled_dot_product_attention. Both in fp32 with AdamW, on random tokens.

    pip install torch==2.11.0 transformers==4.57.1 mambapy==1.2.0
    python benches/peers/pytorch.py --preset mamba-10m --threads 2
"""

import argparse
import json
import logging
import time

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 4096
WIDTH = 256
LAYERS = 8
HEADS = 4


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    logging.disable(logging.WARNING)
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        state_size=16,
        expand=2,
        conv_kernel=4,
        use_bias=False,
        tie_word_embeddings=True,
        use_cache=False,
        use_mambapy=True,
    )
    model = MambaForCausalLM(config).train()
    return model, lambda tokens: model(input_ids=tokens, labels=tokens).loss


class Block(nn.Module):
    """LayerNorm, attention with ALiBi, LayerNorm, GELU between two products; residuals around both halves."""

    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, bias=False)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, bias):
        b, t, _ = x.shape
        heads = self.query_key_value(self.norm_1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out_proj(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down_proj(functional.gelu(self.up_proj(self.norm_2(x))))


class Mpt(nn.Module):
    def __init__(self, positions):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        # Slopes 2^-2, 2^-4, ...: ALiBi's largest bias, 8, divided among four heads.
        slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1))
        past = torch.arange(positions)[:, None] - torch.arange(positions)[None, :]
        bias = -slopes[:, None, None] * past
        self.register_buffer("bias", bias.masked_fill(past < 0, -torch.inf))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.bias)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        logits, following = logits[:, :-1], tokens[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=["mamba-10m", "mpt-10m"], default="mamba-10m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--samples-per-step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(17)
    if arguments.preset == "mamba-10m":
        model, loss_of = mamba()
    else:
        model = loss_of = Mpt(arguments.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    shape = (arguments.samples_per_step, arguments.seq_len)

    def step():
        tokens = torch.randint(0, VOCABULARY, shape)
        loss = loss_of(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    started = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    seconds = time.perf_counter() - started
    tokens = arguments.steps * shape[0] * shape[1]
    print(
        json.dumps(
            {
                "preset": arguments.preset,
                "tokens_per_second": tokens / seconds,
                "parameters": sum(p.numel() for p in model.parameters()),
                "threads": arguments.threads,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
