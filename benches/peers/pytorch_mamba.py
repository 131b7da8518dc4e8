"""Tokens a second of PyTorch on the CPU, for the same model as `tidemill bench train`.

mamba-10m (vocab 4096, d_model 256, 8 layers, state 16, expand 2, conv 4), fp32, AdamW, made-up tokens. The model is
transformers' MambaForCausalLM with the parallel scan of the package mambapy, the fastest that it has without CUDA.

    pip install torch==2.11.0 transformers==4.57.1 mambapy==1.2.0
    python benches/peers/pytorch_mamba.py --threads 2
"""

import argparse
import json
import logging
import time

import torch
from transformers import MambaConfig, MambaForCausalLM

logging.disable(logging.WARNING)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--samples-per-step", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(17)
    config = MambaConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=8,
        state_size=16,
        expand=2,
        conv_kernel=4,
        use_bias=False,
        tie_word_embeddings=True,
        use_cache=False,
        use_mambapy=True,
    )
    model = MambaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    shape = (arguments.samples_per_step, arguments.seq_len)

    def step():
        tokens = torch.randint(0, 4096, shape)
        loss = model(input_ids=tokens, labels=tokens).loss
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
                "tokens_per_second": tokens / seconds,
                "parameters": sum(p.numel() for p in model.parameters()),
                "threads": arguments.threads,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
