"""Drawings of places, and what is said of dreams of them."""

import pytest
import torch

from runs import foreign

HEIGHT_PX, WIDTH_PX = 112, 192


@pytest.mark.parametrize("name", foreign.PLACES)
def test_a_drawing_is_like_itself_and_another_one_is_not(name):
    drawing, regions = foreign.draw(foreign.PLACES[name], HEIGHT_PX, WIDTH_PX)
    assert (drawing.shape, drawing.dtype) == ((HEIGHT_PX, WIDTH_PX, 3), torch.uint8)
    assert set(regions.unique().tolist()) == {0, 1, 2}
    upside_down = drawing.flip(0)
    itself, other = foreign.kept(drawing, regions, torch.stack([drawing, upside_down]))
    assert itself > 0.9 > 0.7 > other  # walls are walls in both
