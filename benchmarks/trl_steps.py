"""Step times of TRL's GRPOTrainer on GSM8K, with its own generation, with vLLM colocated, or with rollouts by tlt.

    python -m benchmarks.trl_steps MODEL --rollouts tlt --prompts gsm8k/train.jsonl

Prints one JSON line: seconds and mean completion length of every step. The first step includes preparations.
"""

import argparse
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tlt.integrations.trl import rollout_func


def reward(completions: list[object], answer: list[str], **_: object) -> list[float]:
    """1 where the last number of the completion is the answer's."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]  # type: ignore[index]
    return [float(last_number(text) == last_number(right)) for text, right in zip(texts, answer, strict=True)]


def last_number(text: str) -> str:
    return (re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) or [""])[-1]


def rows_of(file: Path, chat: bool) -> Dataset:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    texts = [(row.get("prompt") or row["question"], str(row.get("answer", ""))) for row in rows]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p}] if chat else p, "answer": answer} for p, answer in texts]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rollouts", choices=("trl", "vllm", "tlt"), default="tlt")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="completions of a step")
    options = parser.parse_args()
    on_gpu, tokenizer = torch.cuda.is_available(), AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            num_generations=options.group,
            max_completion_length=options.tokens,
            learning_rate=1e-6,
            logging_steps=1,
            report_to=[],
            use_cpu=not on_gpu,
            bf16=on_gpu,
            save_strategy="no",
            seed=1,
            use_vllm=options.rollouts == "vllm",
            vllm_mode="colocate",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
            processing_class=tokenizer,
            reward_funcs=reward,
            args=settings,
            train_dataset=rows_of(options.prompts, chat=bool(tokenizer.chat_template)),
            rollout_func=rollout_func() if options.rollouts == "tlt" else None,
        )
        trainer.train()
    steps = [line for line in trainer.state.log_history if "step_time" in line]
    found = {
        "rollouts": options.rollouts,
        "step_s": [float(line["step_time"]) for line in steps],
        "completion_tokens": [float(line["completions/mean_length"]) for line in steps],
        "reward": [float(line["reward"]) for line in steps],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
