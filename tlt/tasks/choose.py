"""Builds the task that a configuration names, and the judge of its completions."""

from tlt.config import RunConfig
from tlt.tasks.files import FileTask
from tlt.tasks.judge import DirectJudge, Judge
from tlt.tasks.several import judge_with
from tlt.tasks.steps import StepsTask
from tlt.tasks.task import Task
from tlt.tasks.toy import ToyTask

BUILT_IN = ("toy", "steps")  # tasks that need no file


def task_of(config: RunConfig) -> Task:
    if config.task.name == "files":
        return FileTask(config.task, seed=config.run.seed, max_tokens=config.sampling.max_tokens)
    return built_in(config.task.name, config, config.run.seed)


def built_in(name: str, config: RunConfig, seed: int) -> ToyTask | StepsTask:
    """A built-in task, which can also write the solutions of its prompts."""
    if name == "steps":
        return StepsTask(config.task.steps, seed=seed)
    return ToyTask(config.task.toy, seed=seed)


def judge_of(task: Task, config: RunConfig) -> Judge:
    """File tasks are judged in separate processes, with a time limit, any other task in this process. Such a task's own
    reward may be one of the several that `task.rewards` names."""
    if isinstance(task, FileTask):
        return task.judge
    return judge_with(config.task, config.sampling.max_tokens, own=DirectJudge(task))
