"""The sections of a run's configuration: frozen dataclasses whose defaults are the CPU miniature.

Every field has a default and a one-line meaning under it; ranges are checked in ``__post_init__``.
Imports the standard library only; `trm_repro.config` joins the sections and loads files.
"""

from trm_repro.config_sections.checks import (
    require,
    require_at_least,
    require_fraction,
    require_plain_name,
    require_positive,
)
from trm_repro.config_sections.claims import ClaimThresholds
from trm_repro.config_sections.evaluation import EvaluationConfig, EvaluationTask
from trm_repro.config_sections.experiment import OutputConfig, ReproduceConfig, TrackingConfig
from trm_repro.config_sections.health import HealthConfig
from trm_repro.config_sections.mask import MaskConfig, MaxEstimator, MeanEstimator
from trm_repro.config_sections.policy import PolicyConfig, WarmStartConfig
from trm_repro.config_sections.rollout import Precision, RolloutConfig
from trm_repro.config_sections.task import PromptTemplate, TaskConfig
from trm_repro.config_sections.trainer import TrainerConfig
from trm_repro.config_sections.update import LossConfig, LossName, UpdateConfig

__all__ = [
    "ClaimThresholds",
    "EvaluationConfig",
    "EvaluationTask",
    "HealthConfig",
    "LossConfig",
    "LossName",
    "MaskConfig",
    "MaxEstimator",
    "MeanEstimator",
    "OutputConfig",
    "PolicyConfig",
    "Precision",
    "PromptTemplate",
    "ReproduceConfig",
    "RolloutConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "UpdateConfig",
    "WarmStartConfig",
    "require",
    "require_at_least",
    "require_fraction",
    "require_plain_name",
    "require_positive",
]
