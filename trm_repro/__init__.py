"""Trust Region Masking: divergences, bounds, masks, losses and the training loop around them."""

__version__ = "0.1.0"
