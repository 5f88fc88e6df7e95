"""The thresholds of the claims as the runs were started with, and what to say where they are not those given now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from trm_repro.config_sections.claims import ClaimThresholds

PREFIX = "claims."


@dataclass(frozen=True, kw_only=True)
class RecordedThresholds:
    """Which thresholds to test the claims with.

    Attributes:
        thresholds: those recorded with the runs where all runs agree, else those given.
        warnings: sentences a reader of the claims needs; none where the runs agree with what is given.
    """

    thresholds: ClaimThresholds
    warnings: Sequence[str]


def recorded_thresholds(settings: Mapping[str, Mapping[str, str]], given: ClaimThresholds) -> RecordedThresholds:
    """Read the thresholds that the runs were started with.

    Claims are tested with what was set before the runs, whatever the configuration says now. Where runs differ, or
    were recorded without, there is no such thing, and those given are used and said to be.

    Args:
        settings: by name of the run: its configuration as logged, key to text.
        given: those of the configuration at hand.

    Returns:
        Thresholds and warnings.
    """
    lacking = sorted(name for name, values in settings.items() if not _has_all(values))
    texts = {name: _texts(values) for name, values in settings.items() if name not in lacking}
    warnings = []
    if lacking:
        warnings.append(
            f"{len(lacking)} of {len(settings)} runs were recorded without the claims' thresholds ({_few(lacking)}): "
            "for them nothing shows that these were set before."
        )
    different = _differing(list(texts.values()))
    if different:
        warnings.append(
            f"Runs were started with different thresholds ({_few(different)}): the claims are tested with those given "
            "to the report, which not all runs were started with."
        )
    if not texts or different:
        return RecordedThresholds(thresholds=given, warnings=warnings)
    try:
        recorded = _parse(next(iter(texts.values())))
    except ValueError as error:
        warnings.append(f"The recorded thresholds cannot be read ({error}): those given to the report are used.")
        return RecordedThresholds(thresholds=given, warnings=warnings)
    changed = [
        f"{field.name} is {getattr(given, field.name)} now, was {getattr(recorded, field.name)}"
        for field in fields(ClaimThresholds)
        if getattr(given, field.name) != getattr(recorded, field.name)
    ]
    if changed:
        warnings.append(
            f"The configuration's thresholds are not those the runs were started with ({_few(changed)}): the claims "
            "are tested with those of the runs."
        )
    return RecordedThresholds(thresholds=recorded, warnings=warnings)


def _has_all(values: Mapping[str, str]) -> bool:
    return all(f"{PREFIX}{field.name}" in values for field in fields(ClaimThresholds))


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {field.name: values[f"{PREFIX}{field.name}"] for field in fields(ClaimThresholds)}


def _differing(texts: Sequence[Mapping[str, str]]) -> list[str]:
    names = [field.name for field in fields(ClaimThresholds)]
    found = {name: sorted({values[name] for values in texts}) for name in names}
    return [f"{name}: {' and '.join(values)}" for name, values in found.items() if len(values) > 1]


def _parse(texts: Mapping[str, str]) -> ClaimThresholds:
    defaults = ClaimThresholds()
    values: dict[str, float | bool] = {}
    for name, text in texts.items():
        default = getattr(defaults, name)
        if isinstance(default, bool):
            if text not in ("True", "False"):
                raise ValueError(f"claims.{name} is {text[:40]!r}")
            values[name] = text == "True"
        else:
            values[name] = type(default)(text)
    return ClaimThresholds(**values)  # type: ignore[arg-type]  # each value has the type of its default


def _few(texts: Sequence[str]) -> str:
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
