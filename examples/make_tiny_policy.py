"""Makes the policy shipped with tlt: a one-million-parameter character model that half knows the toy task.

    python examples/make_tiny_policy.py [--out DIRECTORY] [--threads N] [--prompts N]

Takes some minutes on two cores. Seeded throughout: the same torch on the same machine with the same number of threads
writes the same weights. The warm-up stops early on purpose, as soon as the policy would write two answers in five
without a slip, so that reinforcement learning has something to improve. At the end the saved policy is read back and
answers prompts at temperature 1; its mean reward and the quantiles of its answers' lengths are printed.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as CharacterTokenizer

from tlt.config import ToySettings, WarmupSettings
from tlt.engine.engine import EngineCore
from tlt.engine.request import Request
from tlt.model.config import ModelConfig
from tlt.model.transformer import Transformer
from tlt.model.weights import load_policy, save_policy
from tlt.tasks.toy import ALPHABET, ToyTask
from tlt.text import Tokenizer
from tlt.train.packing import Example, pack
from tlt.train.supervised import Pair, SupervisedTrainer, answer_loss_sum, batches, encode_pair
from tlt.types import Completion, Key, SamplingParams

PACKAGED = Path(__file__).parent.parent / "tlt" / "data" / "tiny_policy"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
SPARE = "\n.,:;?!/^%<>"  # characters the toy task does not use: a vocabulary of 32 with room for another task
SEED = 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(SPECIAL) + len(ALPHABET) + len(SPARE),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": SPECIAL.index("<pad>"),
    "bos_token_id": SPECIAL.index("<bos>"),
    "eos_token_id": SPECIAL.index("<eos>"),
    "dtype": "float16",
}
INIT_SCALE = 4.0  # of the usual initial weights, which are made for widths in the thousands
TOKENS_PER_STEP = 2048
STEPS = 1750  # of the schedule; the warm-up stops before its end
ENOUGH = 0.4  # probability of a faultless answer, at which it stops
CHECK_EVERY = 50  # steps
GROWING_SHARE = 0.6  # of the steps, over which expressions grow from a few operations to the task's own lengths


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    write_tokenizer(options.out)
    tokenizer = Tokenizer.load(options.out)
    model = train(tokenizer)
    save_policy(model.to(torch.float16), options.out)  # half the bytes, no measurable difference
    report(options.out, options.prompts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PACKAGED)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=400, help="to measure with")
    return parser.parse_args()


# ---- tokenizer: characters, spaces left out


def write_tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = {text: index for index, text in enumerate((*SPECIAL, *ALPHABET, *SPARE))}
    tokenizer = CharacterTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.normalizer = normalizers.Replace(" ", "")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# ---- training


def train(tokenizer: Tokenizer) -> Transformer:
    model = Transformer(ModelConfig.from_hf(CONFIG))
    initialise(model)
    settings = WarmupSettings(steps=STEPS, tokens_per_batch=TOKENS_PER_STEP, learning_rate=5e-3, warmup_steps=30)
    trainer = SupervisedTrainer(model, settings)
    unseen = list(islice(encoded(ToyTask(seed=SEED + 1), 0, tokenizer), 200))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(TextColumn("warm-up"), *columns, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        bar = progress.add_task("warm-up", total=STEPS, loss=float("nan"))
        for step in range(STEPS):
            result = trainer.step(pack(lesson(tokenizer, step), TOKENS_PER_STEP))
            progress.update(bar, advance=1, loss=result.loss)
            if (step + 1) % CHECK_EVERY == 0:
                faultless = faultless_share(model, unseen)
                line = f"step {step + 1}: loss {result.loss:.3f}, faultless answers {faultless:.3f}"
                progress.console.print(line, highlight=False)
                if faultless >= ENOUGH:
                    break
    return model


@torch.no_grad()
def faultless_share(model: Transformer, examples: Sequence[Example]) -> float:
    """Mean probability, at temperature 1, of writing exactly the solution."""
    total = 0.0
    for example in examples:
        row = pack([example], len(example.tokens))[0]
        total += float(torch.exp(-answer_loss_sum(model, row)))
    return total / len(examples)


@torch.no_grad()
def initialise(model: Transformer) -> None:
    model.init_weights(SEED)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(INIT_SCALE)


def lesson(tokenizer: Tokenizer, step: int) -> list[Example]:
    """The examples of one step: short expressions first, then longer ones, at last the task's own lengths."""
    grown = min(1.0, step / (GROWING_SHARE * STEPS))
    task = ToyTask(grown_to(grown), seed=SEED)
    return next(batches(encoded(task, step, tokenizer), TOKENS_PER_STEP))


def grown_to(share: float) -> ToySettings:
    full = ToySettings()
    median = 1.5 + share * (full.median_ops - 1.5)
    return replace(full, median_ops=median, max_ops=round(3 + share * (full.max_ops - 3)))


def encoded(task: ToyTask, step: int, tokenizer: Tokenizer) -> Iterator[Example]:
    for prompt in task.sample(step, TOKENS_PER_STEP // 8):
        yield encode_pair(Pair(prompt.content, task.solution(prompt), prompt.id), tokenizer, TOKENS_PER_STEP)


# ---- measuring


def report(directory: Path, prompts: int) -> None:
    started = time.perf_counter()
    rewards, completions = measure(directory, prompts)
    lengths = sorted(len(completion.tokens) for completion in completions)
    p50, p90, p99 = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.9, 0.99))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {size / 1e6:.2f} MB")
    print(f"{prompts} prompts at temperature 1 in {time.perf_counter() - started:.0f} s")
    print(f"mean reward {sum(rewards) / len(rewards):.3f}")
    print(f"answer length p50 {p50}, p90 {p90}, p99 {p99}, max {lengths[-1]} tokens; p99/p50 = {p99 / p50:.1f}")


def measure(directory: Path, prompts: int) -> tuple[Sequence[float], Sequence[Completion]]:
    tokenizer = Tokenizer.load(directory)
    engine = EngineCore(load_policy(directory), tokenizer)
    task = ToyTask()
    asked = task.sample(0, prompts)
    params = SamplingParams(temperature=1.0, max_tokens=1024)
    engine.submit(
        Request(Key(SEED, index), tuple(tokenizer.encode_prompt(prompt.content)), params)
        for index, prompt in enumerate(asked)
    )
    completions = sorted(engine.drain(), key=lambda completion: completion.key.request)
    return [task.reward(prompt, answer) for prompt, answer in zip(asked, completions, strict=True)], completions


if __name__ == "__main__":
    main()
