"""Rotations are those of the row's position and length alone."""

import pytest
import torch

from service.models.rope import RotaryTable, inverse_frequencies
from service.models.rope_config import RopeConfig

DYNAMIC = RopeConfig("dynamic", 10000.0, 16, original_length=32, factor=2.0)
LONGROPE = RopeConfig(
    "longrope", 10000.0, 16, 32, 4.0, 1.2, short_factor=(1.0,) * 8, long_factor=tuple(range(2, 10))
)


@pytest.mark.parametrize(
    "rope", [DYNAMIC, LONGROPE, RopeConfig("default", 10000.0, 16, 32)], ids=lambda r: r.kind
)
def test_rows_are_independent_of_each_other(rope: RopeConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 1000, (200,), generator=generator)
    lengths = positions + torch.randint(1, 100, (200,), generator=generator)
    cos, sin = RotaryTable(rope).rows(positions, lengths)
    for row in range(0, 200, 7):
        alone = RotaryTable(rope).rows(positions[row : row + 1], lengths[row : row + 1])
        assert torch.equal(alone[0], cos[row : row + 1])
        assert torch.equal(alone[1], sin[row : row + 1])


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=lambda r: r.kind)
def test_length_matters_only_past_the_original(rope: RopeConfig) -> None:
    positions = torch.tensor([5, 5, 5])
    cos, _ = RotaryTable(rope).rows(positions, torch.tensor([6, 32, 33]))
    assert torch.equal(cos[0], cos[1])
    assert not torch.equal(cos[0], cos[2])


def test_attention_factor_scales_both() -> None:
    cos, sin = RotaryTable(LONGROPE).rows(torch.tensor([3]), torch.tensor([4]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((1, 1, 8), 1.44))


def test_linear_stretches_positions() -> None:
    stretched = RopeConfig("linear", 10000.0, 16, 32, factor=4.0)
    plain = RopeConfig("default", 10000.0, 16, 32)
    torch.testing.assert_close(inverse_frequencies(stretched, 0) * 4, inverse_frequencies(plain, 0))


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_tables_by_position_hold_what_rows_would_get(kind: str) -> None:
    rope = RopeConfig(kind, 10000.0, 16, 32, factor=4.0)
    table = RotaryTable(rope)
    short = table.by_position(1)[0]
    cos, sin = table.by_position(700)
    assert len(cos) == len(sin) >= 700
    positions = torch.tensor([0, 255, 256, 699])
    rows = RotaryTable(rope).rows(positions, positions + 1)
    assert torch.equal(cos[positions], rows[0][:, 0])
    assert torch.equal(sin[positions], rows[1][:, 0])
    # Whoever holds an older table may go on using it.
    assert torch.equal(short, cos[: len(short)])
