"""Measure the saved model and its adapters on held-out questions, and print a table.

``python -m demo.evaluate`` reads the float16 weights and computes in float32. An answer is right if
the model's most likely token is the expected token at every position, including the end token.
Greedy decoding then returns exactly this answer. The table's last column is the mean probability of
a right answer when sampling at temperature 1.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from demo.held_out import Case, adapter_cases, base_cases

BATCH_TOKENS = 16384


def _batches(rows: list[tuple[list[int], list[int]]]) -> Iterator[list[int]]:
    """Divide rows (prompt ids, answer ids) into batches of similar length.

    Yield the indexes of each batch's rows. A padded batch has at most ``BATCH_TOKENS`` tokens.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    batch: list[int] = []
    for index in order:
        length = len(rows[index][0]) + len(rows[index][1])
        if batch and (len(batch) + 1) * length > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


@torch.inference_mode()
def score(
    model: nn.Module, rows: list[tuple[list[int], list[int]]], device: str
) -> list[tuple[bool, float]]:
    """Score the expected answer of each row (prompt ids, answer ids).

    Return a tuple per row: True if greedy decoding generates this answer, and the probability of
    the answer when sampling at temperature 1.
    """
    scores = [(False, 0.0)] * len(rows)
    for batch in _batches(rows):
        longest = max(len(rows[i][0]) + len(rows[i][1]) for i in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, index in enumerate(batch):
            both = rows[index][0] + rows[index][1]
            ids[row, : len(both)] = torch.tensor(both)
        logits = model(input_ids=ids.to(device), use_cache=False).logits
        for row, index in enumerate(batch):
            prompt, answer = rows[index]
            places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            log_probs = logits[row, places].float().log_softmax(-1)
            wanted = torch.tensor(answer, device=device)
            greedy = bool((log_probs.argmax(-1) == wanted).all())
            likely = log_probs.gather(1, wanted[:, None]).sum().exp().item()
            scores[index] = (greedy, likely)
    return scores


def measure(
    model: nn.Module, tokenizer: Tokenizer, cases: list[Case], device: str, *, failures: int
) -> list[tuple[str, int, float, float]]:
    """Evaluate the model on all cases, and print up to ``failures`` wrong answers of each skill.

    Return a tuple per skill: its name, the number of cases, and the fraction of right answers with
    greedy decoding and when sampling at temperature 1.
    """
    rows: list[tuple[list[int], list[int]]] = []
    owners: list[int] = []
    for number, case in enumerate(cases):
        prompt = tokenizer.encode(case.prompt, add_special_tokens=False).ids
        for text in case.accepted:
            rows.append((prompt, tokenizer.encode(text, add_special_tokens=False).ids))
            owners.append(number)
    right = [False] * len(cases)
    likely = [0.0] * len(cases)
    for owner, (greedy, probability) in zip(owners, score(model, rows, device), strict=True):
        right[owner] |= greedy
        likely[owner] += probability
    by_skill: dict[str, list[int]] = defaultdict(list)
    for number, case in enumerate(cases):
        by_skill[case.skill].append(number)
    for numbers in by_skill.values():
        for number in [n for n in numbers if not right[n]][:failures]:
            case = cases[number]
            print(f"wrong: {case.skill}: {case.prompt[-120:]!r} expected {case.accepted[0][:80]!r}")
    return [
        (skill, len(numbers), sum(right[n] for n in numbers) / len(numbers),
         sum(likely[n] for n in numbers) / len(numbers))
        for skill, numbers in by_skill.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, default=here / "model")
    parser.add_argument("--adapters", type=Path, default=here / "adapters")
    parser.add_argument("--seed", type=int, default=777)
    parser.add_argument("--failures", type=int, default=0, help="wrong cases to show per skill")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))

    def load() -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model.to(args.device).eval()

    print("| model | skill | questions | right, greedy | right, temperature 1 |")
    print("|---|---|---|---|---|")
    for name in ("base", *sorted(path.name for path in args.adapters.glob("*/"))):
        if name == "base":
            model: nn.Module = load()
            cases = base_cases(args.seed)
        else:
            adapter = PeftModel.from_pretrained(
                load(), args.adapters / name, torch_dtype=torch.float32
            )
            model = adapter.to(args.device).float().eval()
            cases = adapter_cases(args.seed, name)
        for skill, number, right, likely in measure(
            model, tokenizer, cases, args.device, failures=args.failures
        ):
            print(f"| {name} | {skill} | {number} | {right:.1%} | {likely:.1%} |", flush=True)


if __name__ == "__main__":
    main()
