"""One whole reinforcement-learning step of each system, in its own process, for `benchmarks.training_step`."""
