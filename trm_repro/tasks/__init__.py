"""Tasks: problems, and the rule that says whether a response solves one."""

from trm_repro.tasks.chain_arithmetic import ChainArithmetic
from trm_repro.tasks.dataset import DatasetReport, DatasetTask, GradingMode, load_problems
from trm_repro.tasks.math_task import MathTask
from trm_repro.tasks.problems import Grade, Problem, Response, Task
from trm_repro.tasks.sources import ProblemSource

__all__ = [
    "ChainArithmetic",
    "DatasetReport",
    "DatasetTask",
    "Grade",
    "GradingMode",
    "MathTask",
    "Problem",
    "ProblemSource",
    "Response",
    "Task",
    "load_problems",
]
