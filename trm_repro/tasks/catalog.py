"""Data sets by their short names, and where a configuration says to read problems from."""

from pathlib import Path

from trm_repro.config_sections import EvaluationConfig, TaskConfig
from trm_repro.config_sections.evaluation import EvaluationTask
from trm_repro.tasks.sources import ProblemSource

DATASETS: dict[EvaluationTask, tuple[str, str]] = {
    "aime24": ("HuggingFaceH4/aime_2024", "train"),
    "aime25": ("math-ai/aime25", "test"),
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k", "train"),
}
"""Hub name and split of each; evaluation.dataset and evaluation.split win over them."""


def training_source(config: TaskConfig) -> ProblemSource:
    """Say where the problems of task.name math come from."""
    return ProblemSource(
        name=config.dataset,
        revision=config.revision,
        subset=config.subset,
        split=config.split,
        file=None if config.file is None else Path(config.file),
    )


def evaluation_source(config: EvaluationConfig, data: Path | None = None) -> ProblemSource:
    """Say where the problems of an evaluation task other than chain_arithmetic come from.

    Args:
        config: the evaluation section.
        data: a file, or a folder laid out like a hub repository, that wins over the section.

    Returns:
        The source.
    """
    name, split = DATASETS[config.task]
    file = Path(config.file) if config.file is not None else None
    if data is not None and data.is_dir():
        name, file = str(data), None
    else:
        name, file = config.dataset or name, data or file
    return ProblemSource(
        name=name,
        revision=config.revision,
        subset=config.subset,
        split=config.split or split,
        file=file,
        file_mend="--data FILE or evaluation.file=FILE",
    )
