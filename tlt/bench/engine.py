"""`tlt bench engine`: measures the rollout engine against the limit of the machine and against transformers.

Goes through the sections one by one. A section that fails says so; the others go on.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tlt.bench import fidelity, overheads, steps
from tlt.bench import peers as foreign
from tlt.bench.lab import Lab, check_shape, shaped
from tlt.bench.options import BenchOptions
from tlt.bench.peer_file import read_peer
from tlt.bench.report import BenchReport, Clock, Subject
from tlt.config import RunConfig
from tlt.machine import describe
from tlt.model.shapes import MODEL_SHAPES
from tlt.policy import open_policy
from tlt.tasks.token_prompts import token_prompts

_SECTIONS: dict[str, Callable[[Lab], Iterator[Any]]] = {
    "floor": steps.floor,
    "start": steps.start,
    "step": steps.step,
    "context": steps.context,
    "natural": steps.natural,
    "identity": fidelity.identity,
    "logprobs": fidelity.logprobs,
    "features": overheads.features,
    "sync": overheads.sync,
    "peers": foreign.peers,
}


def bench_engine(config: RunConfig, options: BenchOptions) -> None:
    check_shape(options.shape, random_weights=True)
    peer = read_peer(options.peer) if options.peer else None
    clock = Clock()
    policy = open_policy(config.model)
    scale = options.scale(policy.model.embed.is_cuda)
    prompts = token_prompts(policy.tokenizer, scale.rows, options.prompts, options.raw)
    model = shaped(policy.model, options.shape)
    machine = describe(model.embed.device, options.commit)
    if peer and options.peer:
        peer.check(machine.device, model.config, options.peer)
    subject = Subject(
        model=config.model.path,
        shape=_told_shape(options.shape),
        prompts=options.prompts.name if options.prompts else "built in",
        prompt_tokens_mean=sum(map(len, prompts)) / len(prompts),
        seed=config.run.seed,
        temperature=config.sampling.temperature,
    )
    lab = Lab(model, policy.tokenizer, prompts, config, scale, machine, peer)
    report = BenchReport(machine, subject, model.config, scale, options.json, peer=peer)
    clock.lap()
    for name in options.sections:
        if not report.section(name, _SECTIONS[name](lab), clock):
            lab.release()  # what a failed section left behind must not disturb the next
    report.close()


def _told_shape(shape: str | None) -> str:
    if shape is None:
        return "as it is"
    return f"random weights in the shape of {shape}" if shape in MODEL_SHAPES else f"widened to {shape}"
