"""How far our logits are from transformers', on a small random model of every family and on a real one if given.

    python benchmarks/parity.py [--model DIR] [--json FILE]

Prints, per family, the largest |difference| over the largest |logit|: of rows computed alone and packed into one.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.test_model import FAMILIES, LENGTHS, make, our_logits, relative
from tlt.bench.record import new_record, write_record
from tlt.model.transformer import Transformer
from tlt.model.weights import load_policy

TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    "Der lange Schwanz wedelt mit dem Hund. 12 * 7 = 84, and 84 / 4 = 21.",
)


@torch.no_grad()
def compare(theirs: torch.nn.Module, ours: Transformer, rows: list[torch.Tensor]) -> dict[str, float]:
    expected = [theirs(row[None]).logits[0] for row in rows]
    alone = [our_logits(ours, [row])[0] for row in rows]
    packed = our_logits(ours, rows)
    return {
        "single": max(relative(a, b) for a, b in zip(alone, expected, strict=True)),
        "packed": max(relative(a, b) for a, b in zip(packed, expected, strict=True)),
    }


def of_families() -> dict[str, dict[str, float]]:
    found = {}
    for name, config in FAMILIES.items():
        with tempfile.TemporaryDirectory() as directory:
            theirs = make(config, Path(directory))
            rows = [torch.randint(0, config.vocab_size, (length,)) for length in LENGTHS]
            found[name] = compare(theirs, load_policy(directory), rows)
    return found


def of_model(directory: Path) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    rows = [torch.tensor(tokenizer.encode(text)) for text in TEXTS]
    return compare(theirs, load_policy(directory), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory to compare too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = of_families()
    if options.model:
        figures[options.model.name] = of_model(options.model)
    for name, values in figures.items():
        print(f"{name:24} single {values['single']:.1e}  packed {values['packed']:.1e}")
    if options.json:
        benchmark = "parity with transformers, float32, largest difference over largest logit"
        write_record(options.json, new_record("cpu", benchmark=benchmark, figures=figures))


if __name__ == "__main__":
    main()
