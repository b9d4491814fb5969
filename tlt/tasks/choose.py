"""Which task a configuration names, and who judges its answers."""

from tlt.config import RunConfig
from tlt.tasks.files import FileTask
from tlt.tasks.judge import DirectJudge, Judge
from tlt.tasks.steps import StepsTask
from tlt.tasks.task import Task
from tlt.tasks.toy import ToyTask

BUILT_IN = ("toy", "steps")  # tasks that need no file


def task_of(config: RunConfig) -> Task:
    if config.task.name == "files":
        return FileTask(config.task, seed=config.run.seed)
    return built_in(config.task.name, config, config.run.seed)


def built_in(name: str, config: RunConfig, seed: int) -> ToyTask | StepsTask:
    """A task that knows the solutions of its own prompts."""
    if name == "steps":
        return StepsTask(config.task.steps, seed=seed)
    return ToyTask(config.task.toy, seed=seed)


def judge_of(task: Task) -> Judge:
    """A file's answers are judged in a process of their own, with a time limit; any other task judges for itself."""
    return task.judge if isinstance(task, FileTask) else DirectJudge(task)
