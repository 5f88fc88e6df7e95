"""Why token-level methods fail, by enumeration: what still moves the policy after a routing flip.

Source: TRM (arXiv 2512.23075v3), why token-level methods fail; numbers in docs/theory.md, section 12.
"""

import numpy as np
from matplotlib.figure import Figure

from evaluation.statistics import FloatArray
from trm_repro.trees import gradient_reach, routing_flips

LABELS = {"no_mask": "no mask", "ppo_clip": "PPO clip", "token_mask": "token mask", "trm_max": "TRM-Max 0.05"}
STYLES = {"no_mask": "-", "ppo_clip": "--", "token_mask": ":", "trm_max": "-"}


def draw_token_level() -> Figure:
    """Draw what is left after each method, against pi_roll of a token that pi_theta gives 0.9.

    Left: the largest KL among responses that still have gradient. Right: the largest ratio with a negative advantage
    that still has gradient. A gap stands where there is none. Every response of a small tree is enumerated at each
    probability; nothing is sampled.
    """
    probabilities = np.geomspace(1e-3, 0.9, 61)
    reach = gradient_reach(*routing_flips(probabilities))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    kl_axes, ratio_axes = figure.subplots(1, 2)
    for name, label in LABELS.items():
        line = {"linestyle": STYLES[name], "label": label, "linewidth": 2.5 if name == "no_mask" else 1.5}
        kl_axes.plot(probabilities, _gaps(reach[name].max_kl), **line)
        ratio_axes.plot(probabilities, _gaps(reach[name].largest_opposed_ratio), **line)
    kl_axes.set(
        xscale="log", xlabel="pi_roll of the flipped token", ylabel="largest KL in responses with gradient (nats)"
    )
    ratio_axes.set(
        xscale="log",
        yscale="log",
        xlabel="pi_roll of the flipped token",
        ylabel="largest ratio with negative advantage",
    )
    for axes in (kl_axes, ratio_axes):
        axes.grid(alpha=0.25)
    ratio_axes.legend(fontsize=8, title="a line stops where nothing is kept", title_fontsize=8)
    figure.suptitle("A routing flip: pi_theta gives a token 0.9 that pi_roll gives less")
    return figure


def _gaps(values: FloatArray) -> FloatArray:
    """Leave a gap where nothing is kept, which `GradientReach` gives as 0."""
    return np.where(values > 0, values, np.nan)
