"""Train the demo model and its two adapters on the generated corpus.

    python -m demo.train --device cuda            # minutes on one GPU
    python -m demo.train --device cpu --steps ... # README.md has the settings for a CPU

The script needs torch, transformers and peft. The product itself does not need them.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from demo import corpus
from demo import tokenizer as bpe
from demo.chat import encode, segments
from demo.muon import Muon

CONTEXT = 2048
# Lengths in tokens to which training examples are padded. An example is padded to the smallest of
# these lengths in which it fits. Each training step has a batch for each length.
LENGTH_CLASSES = {
    "cuda": (64, 128, 256, 640, 1152, CONTEXT),
    "cpu": (32, 48, 64, 96, 128, 192, 256, 384, 640, CONTEXT),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": bpe.VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}
ADAPTERS = {
    "zh": LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=[
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        ],
    ),
    "ja": LoraConfig(
        r=8, lora_alpha=24, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Encoded training examples, one after the other in the same tensors.

    ``ids`` (int16) and ``weights`` (float32) have one entry per token. A weight is the factor of
    the token's loss, and is 0 outside of answers. ``starts`` and ``lengths`` (int64) have the
    position and the number of tokens of each example. The n answer tokens of an example have the
    total weight n ** 0.5. If all tokens had equal weights, long answers would dominate the loss.
    """

    ids: Tensor
    weights: Tensor
    starts: Tensor
    lengths: Tensor

    def pad(self, chosen: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the token ids (int64) and the weights of the chosen examples, padded with 0.

        Both tensors are ``[rows, length]``. ``chosen`` has the indexes of the examples.
        """
        place = torch.arange(length, device=self.ids.device)
        inside = place < self.lengths[chosen, None]
        index = torch.where(inside, self.starts[chosen, None] + place, 0)
        return self.ids[index].long() * inside, self.weights[index] * inside

    def batches(self, examples: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield the data of training steps without end, each with about ``examples`` examples.

        A step is a list of batches (ids, weights), one for each length in ``LENGTH_CLASSES``. The
        rows have one token more than this length, because a target is the token after its input.
        """
        device = self.ids.device
        rng = torch.Generator(device=device).manual_seed(1)
        classes: list[tuple[int, int, Tensor]] = []
        lower = 0
        for upper in LENGTH_CLASSES[device.type]:
            members = ((self.lengths > lower) & (self.lengths <= upper)).nonzero()[:, 0]
            rows = max(1, round(examples * len(members) / len(self.lengths)))
            if len(members):
                classes.append((upper, rows, members))
            lower = upper
        orders = [members[:0] for _, _, members in classes]
        while True:
            step = []
            for number, (upper, rows, members) in enumerate(classes):
                while len(orders[number]) < rows:
                    shuffled = torch.randperm(len(members), generator=rng, device=device)
                    orders[number] = torch.cat([orders[number], members[shuffled]])
                chosen, orders[number] = orders[number][:rows], orders[number][rows:]
                step.append(self.pad(chosen, upper + 1))
            yield step


def _encode_slice(job: tuple[int, int, str, str]) -> tuple[list[int], list[float], list[int]]:
    seed, number, language, tokenizer_path = job
    tokenizer = Tokenizer.from_file(tokenizer_path)
    all_ids: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for example in corpus.examples(seed, number, language):
        ids, learn = encode(example, tokenizer)
        if len(ids) <= CONTEXT:
            all_ids += ids
            weight = sum(learn) ** -0.5
            weights += [weight if flag else 0.0 for flag in learn]
            lengths.append(len(ids))
    return all_ids, weights, lengths


def make_pool(seed: int, number: int, language: str, tokenizer_path: Path, device: str) -> Pool:
    """Generate and encode about ``number`` training examples, in parallel processes.

    64 jobs with different seeds generate the same number of examples each. Examples that do not fit
    in the context are left out.
    """
    slices = 64
    jobs = [(seed + i, number // slices, language, str(tokenizer_path)) for i in range(slices)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("spawn").Pool() as workers:
        parts = workers.map(_encode_slice, jobs, chunksize=1)
    lengths = torch.tensor([n for part in parts for n in part[2]], device=device)
    return Pool(
        torch.cat([torch.tensor(part[0], dtype=torch.int16) for part in parts]).to(device),
        torch.cat([torch.tensor(part[1], dtype=torch.float32) for part in parts]).to(device),
        lengths.cumsum(0) - lengths,
        lengths,
    )


class Layers(nn.Module):
    """The decoder layers of a Llama model, without the embedding and the output projection.

    ``forward`` maps embeddings ``[rows, length, hidden]`` to the final hidden states.
    """

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.layers, self.norm = llama.model.layers, llama.model.norm
        self.rotary = llama.model.rotary_emb

    def forward(self, hidden: Tensor) -> Tensor:
        device = hidden.device
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda", False):
            places = torch.arange(hidden.shape[1], device=device)[None]
            rotary = self.rotary(hidden, places)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=rotary)
            return self.norm(hidden)


def record_graphs(llama: LlamaForCausalLM, inputs: Tensor) -> nn.Module:
    """Return the decoder layers as a module for embeddings of the shape of ``inputs``.

    On a GPU, the module is recorded as CUDA graphs: the model is so small that launching its
    kernels one by one would take most of the time.
    """
    layers = Layers(llama)
    if inputs.device.type != "cuda":
        return layers
    return torch.cuda.make_graphed_callables(layers, (inputs.detach().requires_grad_(),))


def answer_loss(llama: LlamaForCausalLM, layers: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the cross entropy of the tokens with a positive weight.

    Logits are computed only for these tokens, which are the tokens of answers.
    """
    hidden = layers(llama.model.embed_tokens(ids[:, :-1]))
    wanted = weights[:, 1:] > 0
    with torch.autocast(ids.device.type, torch.bfloat16, ids.device.type == "cuda"):
        logits = llama.lm_head(hidden[wanted])
    losses = nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted], reduction="none")
    return (losses * weights[:, 1:][wanted]).sum()


def fit(
    model: LlamaForCausalLM | PeftModel,
    pool: Pool,
    optimizers: list[torch.optim.Optimizer],
    steps: int,
    batch: int,
) -> None:
    """Train the model in place for ``steps`` steps of about ``batch`` examples.

    The learning rate rises linearly during the first 3 % of the steps, then falls linearly to 0.
    """
    llama = model.get_base_model() if isinstance(model, PeftModel) else model
    if isinstance(model, PeftModel):
        llama.model.embed_tokens.register_forward_hook(lambda _, __, out: out.requires_grad_())
    parameters = [p for p in model.parameters() if p.requires_grad]
    rates = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    layers: dict[int, nn.Module] = {}
    started = time.monotonic()
    for step, batches in enumerate(pool.batches(batch)):
        if step == steps:
            break
        factor = min((step + 1) / (0.03 * steps + 1), 1 - step / steps)
        for group, rate in rates:
            group["lr"] = rate * factor
        scale = torch.stack([weights.sum() for _, weights in batches]).sum()
        losses = []
        for ids, weights in batches:
            length = ids.shape[1] - 1
            if length not in layers:
                layers[length] = record_graphs(llama, llama.model.embed_tokens(ids[:, :-1]))
            loss = answer_loss(llama, layers[length], ids, weights) / scale
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % max(1, steps // 40) == 0 or step == 9:
            loss, seconds = torch.stack(losses).sum(), time.monotonic() - started
            print(f"step {step + 1}/{steps} loss {loss:.4f} {seconds:.0f} s", flush=True)


def train_base(args: argparse.Namespace) -> None:
    """Train the tokenizer and the base model. Write ``model/`` with float16 weights."""
    folder: Path = args.out / "model"
    if not args.resume:
        texts = (
            "".join(text for text, _ in segments(example))
            for language, number in (("en", 12000), ("zh", 3000), ("ja", 3000))
            for example in corpus.examples(args.seed, number, language)
        )
        bpe.save(bpe.train(texts), folder, CONTEXT)
    pool = make_pool(args.seed, args.examples, "en", folder / "tokenizer.json", args.device)
    print(f"base: {len(pool.lengths)} examples, {len(pool.ids) / 1e6:.1f} M tokens", flush=True)
    torch.manual_seed(args.seed)
    if args.resume:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device)
    else:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float().to(args.device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    fit(model, pool, [
        Muon(matrices, lr=args.rate),
        torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ], args.steps, args.batch)  # fmt: skip
    tensors = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {
        key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    })  # fmt: skip


def train_adapter(args: argparse.Namespace, name: str) -> None:
    """Train a LoRA adapter for the saved base model. Write ``adapters/NAME`` in PEFT's format."""
    folder: Path = args.out / "adapters" / name
    model_folder = args.out / "model"
    seed = args.seed + 1000 * (1 + list(ADAPTERS).index(name))
    pool = make_pool(
        seed, args.adapter_examples, name, model_folder / "tokenizer.json", args.device
    )
    base = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32).to(args.device)
    torch.manual_seed(seed)
    model = get_peft_model(base, ADAPTERS[name])
    if not isinstance(model, PeftModel):
        raise TypeError(f"peft made a {type(model)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    print(f"{name}: {sum(p.numel() for p in parameters)} parameters", flush=True)
    optimizer = torch.optim.AdamW(parameters, lr=args.adapter_rate, weight_decay=0.0)
    fit(model, pool, [optimizer], args.adapter_steps, args.adapter_batch)
    model.half()
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = "demo"
    config["target_modules"] = sorted(config["target_modules"])
    write_json(folder / "adapter_config.json", config)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--parts", nargs="+", default=["base", *ADAPTERS], choices=["base", *ADAPTERS]
    )
    parser.add_argument("--steps", type=int, default=4300, help="of the base model")
    parser.add_argument("--batch", type=int, default=512, help="examples a step")
    parser.add_argument("--examples", type=int, default=600_000, help="generated for the base")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--adapter-steps", type=int, default=800)
    parser.add_argument("--adapter-batch", type=int, default=384)
    parser.add_argument("--adapter-examples", type=int, default=150_000)
    parser.add_argument("--adapter-rate", type=float, default=2e-3)
    parser.add_argument("--resume", action="store_true", help="go on from the saved base model")
    parser.add_argument("--seed", type=int, default=20250)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    random.seed(args.seed)
    for part in args.parts:
        started = time.monotonic()
        if part == "base":
            train_base(args)
        else:
            train_adapter(args, part)
        print(f"{part}: {math.ceil(time.monotonic() - started)} s", flush=True)


if __name__ == "__main__":
    main()
