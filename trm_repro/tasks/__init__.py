"""Tasks: problems, and the rule that says whether a response solves one."""

from trm_repro.tasks.chain_arithmetic import ChainArithmetic
from trm_repro.tasks.dataset import DatasetTask, load_problems
from trm_repro.tasks.problems import Grade, Problem, Response, Task

__all__ = ["ChainArithmetic", "DatasetTask", "Grade", "Problem", "Response", "Task", "load_problems"]
