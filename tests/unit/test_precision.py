import math
import struct
from typing import get_args

import pytest
import torch

from tests.unit.builders import tiny_policy
from trm_repro.config_sections import Precision
from trm_repro.rollout.precision import compute_dtype, round_weight

MATRIX = "model.layers.0.self_attn.q_proj.weight"


def to_bfloat16(value):
    """Round to nearest, ties to even, by the bits: bfloat16 is the upper half of float32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", rounded))[0]


def e4m3_values():
    """All finite non-negative values of float8 e4m3: 4 exponent bits (bias 7), 3 mantissa bits, by the code."""
    values = []
    for code in range(0x7F):  # 0x7F is NaN
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


E4M3 = e4m3_values()


def to_e4m3(value):
    distances = [abs(abs(value) - candidate) for candidate in E4M3]
    nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = nearest[0] if len(nearest) == 1 else next(code for code in nearest if code % 2 == 0)
    return math.copysign(E4M3[code], value)


def naive_rounding(weight, largest, round_one):
    """Scale each output channel to its largest absolute value, round, scale back; float32 steps as the engine's."""
    rows = []
    for row in weight.tolist():
        scale = float(torch.tensor(max(abs(value) for value in row)) / largest)
        rounded = [round_one(float(torch.tensor(value) / torch.tensor(scale))) for value in row]
        rows.append([to_bfloat16(float(torch.tensor(value) * torch.tensor(scale))) for value in rounded])
    return rows


@pytest.fixture
def weight():
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    weight[1] *= 100.0  # channels of different size need scales of their own
    weight[2] *= 1e-3
    return weight


def test_e4m3_as_written_here_is_torchs():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.float().tolist() == E4M3
    assert max(E4M3) == 448.0


def test_bfloat16_rounds_every_weight_to_nearest_even(weight):
    rounded = round_weight(MATRIX, weight, "bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert rounded.float().tolist() == [[to_bfloat16(value) for value in row] for row in weight.tolist()]


def test_float32_changes_nothing(weight):
    assert torch.equal(round_weight(MATRIX, weight, "float32"), weight)


def test_int8_equals_a_loop_over_channels(weight):
    rounded = round_weight(MATRIX, weight, "int8")
    assert rounded.dtype == torch.bfloat16
    assert rounded.float().tolist() == naive_rounding(weight, 127.0, round)  # round() is half to even too


def test_fp8_equals_a_loop_over_channels(weight):
    rounded = round_weight(MATRIX, weight, "fp8")
    assert rounded.dtype == torch.bfloat16
    assert rounded.float().tolist() == naive_rounding(weight, 448.0, to_e4m3)


def test_int8_by_hand():
    # the largest value is 127 steps of 1; 2.5 rounds to even
    weight = torch.tensor([[127.0, 2.4, 2.5, -3.6, 0.0]])
    assert round_weight(MATRIX, weight, "int8").tolist() == [[127.0, 2.0, 2.0, -4.0, 0.0]]


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_experts_are_rounded_one_by_one(precision):
    weight = (
        torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 9.0, 0.1])[:, None, None]
    )
    together = round_weight("model.layers.0.mlp.experts.gate_up_proj", weight, precision)
    for expert in range(3):
        assert torch.equal(together[expert], round_weight(MATRIX, weight[expert], precision))


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_channel_of_zeros_stays_zero(precision):
    assert round_weight(MATRIX, torch.zeros(2, 3), precision).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_embeddings_head_norms_and_routers_stay_in_bfloat16(precision, architecture):
    policy = tiny_policy(architecture, tie_word_embeddings=False)
    for name, weight in policy.model.named_parameters():
        rounded = round_weight(name, weight.detach(), precision)
        is_plain = torch.equal(rounded, weight.detach().bfloat16())
        assert is_plain == any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate.weight")), name


@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_precision_computes_in_float32_or_bfloat16(precision, weight):
    expected = torch.float32 if precision == "float32" else torch.bfloat16
    assert compute_dtype(precision) == expected
    assert round_weight(MATRIX, weight, precision).dtype == expected


@pytest.mark.parametrize(("precision", "largest_step"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_the_rounding_error_is_at_most_half_a_step(precision, largest_step, weight):
    rounded = round_weight(MATRIX, weight, precision).float()
    size = weight.abs().amax(dim=-1, keepdim=True) if precision == "int8" else weight.abs() + 1e-4 * weight.abs().amax()
    bfloat16_step = 2**-8 * weight.abs()
    assert bool(((rounded - weight).abs() <= largest_step * size + bfloat16_step).all())
    assert not torch.equal(rounded, round_weight(MATRIX, weight, "bfloat16").float())
