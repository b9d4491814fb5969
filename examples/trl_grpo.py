"""TRL's GRPOTrainer with rollouts by tlt, on a CPU in a minute: `pip install tlt-rl trl`, then run this file.

Only the line with `rollout_func` is about tlt. With a larger policy: `python trl_grpo.py Qwen/Qwen2.5-0.5B-Instruct`.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tlt.integrations.trl import rollout_func
from tlt.policy import TINY_POLICY


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """1 for an answer that ends in the value of the expression, modulo 10."""
    values = [eval(prompt.rstrip("="), {"__builtins__": {}}) % 10 for prompt in prompts]
    return [float(text.strip().endswith(str(value))) for text, value in zip(completions, values, strict=True)]


def main(policy: str = str(TINY_POLICY), steps: int = 4, out: str = "runs/trl") -> GRPOTrainer:
    prompts = [f"{a}+{b}*{c}=" for a in range(1, 5) for b in range(1, 5) for c in range(1, 5)]
    on_gpu = torch.cuda.is_available()
    settings = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64,
        learning_rate=1e-4,
        logging_steps=1,
        report_to=[],
        use_cpu=not on_gpu,
        bf16=on_gpu,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy),
        processing_class=AutoTokenizer.from_pretrained(policy),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        rollout_func=rollout_func(kv_gib=0.2),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:2])
    print(f"policy and logs: {Path('runs/trl').resolve()}")
