"""The mean over an arm's seeds, step by step: what an arm's own run shows. Pure."""

from collections.abc import Sequence

from pipelines.spool import SpoolEntry


def arm_means(spools: Sequence[Sequence[SpoolEntry]]) -> list[SpoolEntry]:
    """Average the entries that every seed has.

    Only steps that every seed has finished count, so that the list of a longer spool begins with that of a shorter.

    Args:
        spools: one a seed, entries in the order written.

    Returns:
        One entry for each step and kind that all have, by step: the mean of each metric that all of them hold, at
        the time of the last of them.
    """
    if not spools:
        return []
    finished = min(max((entry.step for entry in spool if entry.kind == "train"), default=-1) for spool in spools)
    tables = [{(entry.step, entry.kind): entry for entry in spool if entry.step <= finished} for spool in spools]
    shared = set.intersection(*(set(table) for table in tables))
    return [_mean([table[key] for table in tables]) for key in sorted(shared)]


def _mean(entries: Sequence[SpoolEntry]) -> SpoolEntry:
    names = [name for name in entries[0].metrics if all(name in entry.metrics for entry in entries)]
    return SpoolEntry(
        step=entries[0].step,
        kind=entries[0].kind,
        time=max(entry.time for entry in entries),
        metrics={name: sum(entry.metrics[name] for entry in entries) / len(entries) for name in names},
    )
