"""What `trm-repro reproduce` runs, where a run writes, and MLflow."""

from dataclasses import dataclass

from trm_repro.config_sections.checks import require, require_at_least, require_texts


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Which arms and seeds `trm-repro reproduce` runs, and by how many processes."""

    arms: tuple[str, ...] = (
        "trm_avg_0.001",
        "ppo_clip",
        "random_as_trm_avg_0.001",
        "token_is",
        "trm_max_0.05",
        "trm_max_0.1",
        "trm_avg_0.002",
        "trm_max_0.1_avg_0.002",
        "trm_avg_0.001_bounded_step",
    )
    """Arms, each a file in conf/arms."""
    seeds: tuple[int, ...] = (501, 502)
    """Seeds; each has its own warm start, training prompts and held-out problems."""
    num_workers: int = 2
    """Worker processes, one engine each."""
    max_attempts: int = 3
    """Times a run is started again after its process died."""
    hypotheses: tuple[str, ...] = ()
    """What is expected, set before the runs and recorded with them; `trm-repro study` writes a cell's here."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require_texts("reproduce", hypotheses=self.hypotheses)
        require(len(self.arms) > 0, "reproduce.arms", "a list with at least one arm", self.arms)
        require(len(self.seeds) > 0, "reproduce.seeds", "a list with at least one seed", self.seeds)
        require(len(set(self.arms)) == len(self.arms), "reproduce.arms", "without repeats", self.arms)
        require(len(set(self.seeds)) == len(self.seeds), "reproduce.seeds", "without repeats", self.seeds)
        require_at_least("reproduce", 0, **{f"seeds[{index}]": seed for index, seed in enumerate(self.seeds)})
        require_at_least("reproduce", 1, num_workers=self.num_workers, max_attempts=self.max_attempts)


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Where a run writes."""

    dir: str = "runs/miniature"
    """Folder of this experiment."""
    warm_start_dir: str = "runs/warm_starts"
    """Cache of warm-started policies, by hash of what they depend on."""
    keep_shards_every: int = 10
    """Keep the rollout shard of every n-th step; the newest is always kept."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; a damaged one is left out for the one before it."""
    checkpoint_every_steps: int = 1
    """Steps between two checkpoints; after the last step there is always one."""

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("dir", "warm_start_dir"):
            path = getattr(self, name)
            require(path.strip() != "" and path.isprintable(), f"output.{name}", "a path of printable text", path)
        require_at_least("output", 1, keep_shards_every=self.keep_shards_every)
        require_at_least("output", 1, checkpoint_every_steps=self.checkpoint_every_steps)
        require_at_least("output", 1, keep_checkpoints=self.keep_checkpoints)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """MLflow."""

    uri: str | None = None
    """Tracking URI; null is SQLite at mlflow.db in output.dir."""
    experiment: str = "trm-repro"
    """Experiment name."""

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.experiment.strip() != "", "tracking.experiment", "not empty", self.experiment)
        require(self.uri != "", "tracking.uri", "null or not empty", self.uri)
