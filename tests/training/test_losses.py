import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.checkpoints import load_model
from diagd.training.losses import ViewLoss, next_token_loss, view_loss
from diagd.training.sequences import draw_batch
from tests.worlds import SHARD_CODES as NUM_CODES
from tests.worlds import SHARD_NAMES as NAMES
from tests.worlds import clips_of, write_shard_model

HEIGHT, WIDTH = 2, 3  # of the clips


def test_the_loss_is_that_of_the_visual_tokens_alone():
    tokens = draw_batch(clips_of(), 3, 2, 0)
    vocabulary = NUM_CODES + len(NAMES)
    shape = (2, tokens.shape[1] - 1, vocabulary)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected, seen = [], []

    class Model(torch.nn.Module):
        def forward(self, inputs):
            seen.append(inputs)
            return logits

    for row in range(2):
        for place, target in enumerate(tokens[row, 1:].tolist()):
            if target < NUM_CODES:
                expected.append(-logits[row, place].log_softmax(-1)[target].item())
    loss = next_token_loss(Model(), tokens, NUM_CODES)
    assert len(expected) == 2 * (3 * HEIGHT * WIDTH - 1)  # all but the first frame's first token
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert torch.equal(seen[0], tokens[:, :-1])
    at_actions = tokens[:, 1:] >= NUM_CODES
    logits[at_actions] = 100 * torch.randn(int(at_actions.sum()), vocabulary)
    assert next_token_loss(Model(), tokens, NUM_CODES).item() == loss.item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_the_dense_mask(tmp_path):
    """Its kernels want a GPU; what they are told, they can be told anywhere."""
    grid = TokenGrid(3, 2, 3)
    view = teacher_view(DiagonalSchedule(grid, 1, 2), SequenceLayout(grid, 1, 1))
    tokens, lanes = draw_batch(clips_of(), 4, 2, 0), len(view.positions)
    block_mask = create_block_mask(view.mask_mod(), None, None, lanes, lanes, device="cpu")
    targets = tokens[:, view.targets[view.readers]]
    inputs = tokens[:, view.sources], view.positions, block_mask, view.readers, targets
    with torch.no_grad():
        model = load_model(write_shard_model(tmp_path / "init"))
        flex = view_loss(model, *inputs)
        assert flex.item() == pytest.approx(
            ViewLoss(view, torch.device("cpu"))(model, tokens).item(), abs=1e-5
        )
