"""Every reader under test, by name."""

from tests.fuzz import answers, dumps, run_files, settings_files

TARGETS = {**settings_files.TARGETS, **run_files.TARGETS, **dumps.TARGETS, **answers.TARGETS}
