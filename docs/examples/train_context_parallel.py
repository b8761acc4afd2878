"""Trains a small language model on sequences that are spread over several processes, with FSDP2.

    torchrun --nproc-per-node 2 docs/examples/train_context_parallel.py            # on GPUs, else on the CPU
    torchrun --nproc-per-node 2 docs/examples/train_context_parallel.py --cpu --steps 5 --tokens 256

Each process holds a part of every sequence and a part of the parameters. The loss of a step does not depend
on the number of processes, but for rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from flash_attention.distributed import Layout
from flash_attention.distributed.transformers import context_parallel

VOCABULARY = 256


def sequences(tokens: int, device: torch.device) -> Iterator[Tensor]:
    """Text to learn: each token is that of seven before, moved on by one. Equal in every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        start = torch.randint(16, (1, 7), generator=generator)
        rounds = torch.arange(-(-tokens // 7))[:, None]
        yield ((start + rounds).flatten()[None, :tokens] % VOCABULARY).to(device)


def model_of(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=options.hidden // 8, max_position_embeddings=options.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device).train()


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step."""
    on_gpu = torch.cuda.is_available() and not options.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    model = model_of(options, device)
    parallel = context_parallel(model, mesh["cp"], method=options.method)
    # Parameters are bfloat16 where they compute; their gradients are added up in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["cp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["cp"], mp_policy=policy)
    # Not Adam: its first steps divide by the size of gradients, where rounding decides.
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
    layout = Layout.zigzag(options.tokens, parallel.world)
    losses = []
    for _, tokens in zip(range(options.steps), sequences(options.tokens, device), strict=False):
        loss = model(**parallel.batch(layout, tokens, tokens)).loss
        # The loss is a share of the whole. FSDP takes the mean of the gradients, and their sum is wanted.
        (loss * parallel.world).backward()
        # Large steps blow rounding up: the loss rises, how far is no longer the same for 1 and 2 processes.
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.norm)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().float()
        dist.all_reduce(whole, group=parallel.group)
        losses.append(float(whole))
        if parallel.rank == 0:
            print(f"step {len(losses):3d}  loss {losses[-1]:.4f}", flush=True)
    if options.json and parallel.rank == 0:
        Path(options.json).write_text(json.dumps(losses), encoding="utf-8")
    dist.destroy_process_group()
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--norm", type=float, default=1.0, help="largest of all gradients together")
    parser.add_argument("--method", default="auto", help="auto, all_gather, ring or ulysses")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, with gloo")
    parser.add_argument("--json", help="write the losses to this file")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
    # gloo's threads may still wait for the interpreter, to free tensors that they sent. One that shuts down
    # ends them within a function that must not be left, which aborts the process: it is left as it is.
    sys.stdout.flush()
    os._exit(0)
