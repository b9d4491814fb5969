"""Which task a configuration names."""

from tlt.config import RunConfig
from tlt.tasks.task import Task
from tlt.tasks.toy import ToyTask


def task_of(config: RunConfig) -> Task:
    makers = {"toy": lambda: ToyTask(config.task.toy, seed=config.run.seed)}
    return makers[config.task.name]()
